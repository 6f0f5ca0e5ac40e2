"""Shard a model as planned: `fully_shard` on each planned group, then on the model itself.

solution = solve(model, batch, budget="16GB", optimizer=..., fsdp=8)
exported = to_torch_checkpoint(model, solution)
shard(model, solution, mesh=mesh)
...                  # make the optimizer now, of the shards; train as before
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from graphs.fsdp import ShardingError, sharding_of
from scheduler_runtime.ranks import on_all_ranks
from solver.schedule import Solution


def shard(model: nn.Module, solution: Solution, *, mesh: DeviceMesh) -> nn.Module:
    """Call `fully_shard` on the groups that the solution was planned with; returns the model.

    mesh: of one dimension, with as many ranks as were planned for. `fully_shard` is called with its
        default options: others change what a rank holds.

    Raises ShardingError: the solution is not for a sharded step, or for another number of ranks;
    RanksDisagreeError where other ranks have such a solution, or another plan (`on_all_ranks`).
    """
    if mesh.ndim != 1:
        raise ShardingError(
            f"the mesh has the shape {tuple(mesh.shape)}; give one of one dimension"
        )
    agreed = on_all_ranks(lambda: _checked(solution, mesh), group=mesh.get_group())
    sharding = sharding_of(agreed.environment)
    assert sharding is not None
    for path in reversed(sharding.groups or ()):  # nested groups before those that contain them
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _checked(solution: Solution, mesh: DeviceMesh) -> Solution:
    """The solution, if it is for ranks of this mesh."""
    sharding = sharding_of(solution.environment)
    if sharding is None:
        raise ShardingError(
            "the solution is for a step that is not sharded; solve(model, batch, ..., fsdp=N) "
            "plans for one of N ranks"
        )
    if mesh.size() != sharding.n_ranks:
        raise ShardingError(
            f"the mesh has the shape {tuple(mesh.shape)}, and the plan is for {sharding.n_ranks} "
            f"ranks; solve with fsdp={mesh.size()}, or pass a mesh with {sharding.n_ranks}"
        )
    return solution
