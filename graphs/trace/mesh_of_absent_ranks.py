"""A device mesh of ranks that do not run, to plan for one of them in a single process.

    with fake_mesh(8) as mesh:
        with torch.device("meta"):
            model = parallelize_module(Model(), mesh, styles)
        solution = solve(model, batch, budget="70GB", optimizer="AdamW", device="h100")

It is built on PyTorch's "fake" process group, whose collectives return at once and do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphs.model_calls import TraceError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSION = "tp"
"""The name of the mesh's only dimension, the same as in torchtitan."""


@contextlib.contextmanager
def fake_mesh(n_ranks: int) -> Iterator[DeviceMesh]:
    """A context with a one-dimensional mesh, "tp", in which this process is rank 0. Distribute
    modules and plan inside it.

    Nothing is communicated, so a weight's part has the values that this process has; weights may be
    on the meta device.

    n_ranks: at least 2.

    Raises ValueError for fewer ranks, and TraceError if a process group is initialised already.
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
