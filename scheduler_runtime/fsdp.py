"""Shard a model as planned: `fully_shard` on each planned group, then on the model itself.

solution = solve(model, batch, budget="16GB", optimizer=..., fsdp=8)
exported = to_torch_checkpoint(model, solution)
shard(model, solution, mesh=mesh)
...                  # make the optimizer now, of the shards; train as before
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from graphs.fsdp import MixedPrecision, ShardingError, sharding_of
from scheduler_runtime.ranks import on_all_ranks
from solver.schedule import Solution


def shard(model: nn.Module, solution: Solution, *, mesh: DeviceMesh) -> nn.Module:
    """Call `fully_shard` on the groups that the solution was planned with; returns the model.

    `fully_shard` gets the options of the plan's `Sharding`, and its defaults otherwise: other
    options would change what a rank holds.

    mesh: with as many ranks as planned; for hybrid sharding, with two dimensions (replicas, ranks).

    Raises ShardingError if the solution is not for a sharded step, or is for another mesh;
    RanksDisagreeError if that is so on another rank, or if ranks have different plans
    (`on_all_ranks`), or have exported the plan to different modules.
    """
    agree: Callable[[], Solution] = functools.partial(_checked_for_mesh, solution, mesh)
    # First along the columns of the mesh, then along its rows: then each rank has heard of all.
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        agree = functools.partial(on_all_ranks, agree, group=group, model=model)
    sharding = sharding_of(agree().environment)
    assert sharding is not None
    # None reshards all groups but the root, whose parameters the backward pass needs at once
    reshards = None if sharding.reshard_after_forward else False
    policy = _policy(sharding.mp_policy or MixedPrecision())
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshards, "mp_policy": policy}
    for path in reversed(sharding.groups or ()):  # nested groups before those that contain them
        fully_shard(model.get_submodule(path), **options)
    fully_shard(model, **options)
    return model


def _policy(described: MixedPrecision) -> MixedPrecisionPolicy:
    dtypes = {
        name: None if (dtype := getattr(described, name)) is None else getattr(torch, dtype)
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
    }
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=described.cast_forward_inputs)


def _checked_for_mesh(solution: Solution, mesh: DeviceMesh) -> Solution:
    """The solution, if it is for a rank of this mesh. Raises ShardingError."""
    sharding = sharding_of(solution.environment)
    if sharding is None:
        raise ShardingError(
            "the solution is for a step that is not sharded; solve(model, batch, ..., fsdp=N) "
            "plans for one of N ranks"
        )
    n_replicas, n_ranks = sharding.n_replicas, sharding.n_ranks
    wanted = (n_ranks,) if n_replicas == 1 else (n_replicas, n_ranks)
    if tuple(mesh.shape) != wanted:
        raise ShardingError(
            f"the mesh has the shape {tuple(mesh.shape)}, and the plan is for {wanted}: one "
            "dimension of the ranks that share a parameter, and before it one of replicas, if "
            "there are any (fsdp=Sharding(n_ranks=..., n_replicas=...))"
        )
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ShardingError(
            "FSDP2 takes a mesh of two dimensions with their names: init_device_mesh(..., "
            'mesh_dim_names=("replicate", "shard"))'
        )
    return solution
