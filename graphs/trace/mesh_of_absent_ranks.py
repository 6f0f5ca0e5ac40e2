"""A device mesh of ranks that are not there, to plan for one of them in a process of its own.

    with fake_mesh(8) as mesh:
        with torch.device("meta"):
            model = parallelize_module(Model(), mesh, styles)
        solution = solve(model, batch, budget="70GB", optimizer="AdamW", device="h100")

PyTorch's "fake" process group has ranks that never answer: collectives on it do nothing at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphs.model_calls import TraceError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSION = "tp"
"""The name of the mesh's one dimension, as torchtitan has it."""


@contextlib.contextmanager
def fake_mesh(n_ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of one dimension, "tp", whose first rank is this process; inside it modules are
    distributed and planned. Weights stay as they are, or on the meta device.

    n_ranks: at least 2.

    Raises ValueError for fewer ranks, TraceError where a process group is initialised already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 2:
        raise ValueError(f"n_ranks is {n_ranks!r}; expected a whole number of at least 2")
    if dist.is_initialized():
        raise TraceError(
            "a process group is initialised in this process: make the mesh of its ranks "
            "(init_device_mesh), or plan in a process without one"
        )
    dist.init_process_group("fake", rank=0, world_size=n_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (n_ranks,), mesh_dim_names=(DIMENSION,))
    finally:
        dist.destroy_process_group()
