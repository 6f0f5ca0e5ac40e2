"""Shard a model as was planned: `fully_shard` on each planned group, then on the model itself.

solution = solve(model, batch, budget="16GB", optimizer=..., fsdp=8)
exported = to_torch_checkpoint(model, solution)
shard(model, solution, mesh=mesh)
...                  # make the optimizer now, of the shards; train as before
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from graphs.fsdp import Sharding, ShardingError, sharding_of
from solver.schedule import Solution


def shard(model: nn.Module, solution: Solution, *, mesh: DeviceMesh) -> nn.Module:
    """Call `fully_shard` on the groups that the solution was planned with; returns the model.

    mesh: of one dimension, with as many ranks as were planned. Options of `fully_shard` other than
    its default ones change what a rank holds, so they are not taken here.

    Raises ShardingError: the solution is of a step that is not sharded, or of another number of
    ranks.
    """
    sharding = _planned(solution)
    if mesh.ndim != 1 or mesh.size() != sharding.n_ranks:
        raise ShardingError(
            f"the mesh has the shape {tuple(mesh.shape)}, and the plan is for {sharding.n_ranks} "
            f"ranks; solve with fsdp={mesh.size()}, or give a mesh of one dimension with "
            f"{sharding.n_ranks}"
        )
    options: dict[str, Any] = {"mesh": mesh}
    for path in reversed(sharding.groups or ()):  # what is inside of another one comes first
        fully_shard(model.get_submodule(path), **options)
    fully_shard(model, **options)
    return model


def _planned(solution: Solution) -> Sharding:
    sharding = sharding_of(solution.environment)
    if sharding is None:
        raise ShardingError(
            "the solution is for a step that is not sharded; solve(model, batch, ..., fsdp=N) "
            "plans for one of N ranks"
        )
    return sharding
