"""Refuses DTensors that cannot be planned: a plan is for one 1-d mesh and even shards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from graphs.model_calls import TraceError, is_distributed


class MeshError(TraceError):
    """The ranks of the mesh cannot share the model evenly; says which dimension is at fault."""


_STYLES = "torch.distributed.tensor"


def is_of_parallel_style(hook: Callable[..., Any]) -> bool:
    """Whether `parallelize_module` has put this hook on a submodule.

    Such a hook distributes the inputs or outputs of the submodule by DTensor's operators, which a
    trace records.
    """
    return str(getattr(hook, "__module__", "")).startswith(_STYLES)


def has_parallel_style(module: nn.Module) -> bool:
    """Whether `parallelize_module` has put hooks on the module itself."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(map(is_of_parallel_style, hooks))


def has_distributed(model: nn.Module) -> bool:
    """Whether parameters or buffers of the model are DTensors."""
    return any(map(is_distributed, (*model.parameters(), *model.buffers())))


def refuse_distributed(model: nn.Module, batch: Iterable[torch.Tensor]) -> None:
    """Raise TraceError for DTensors that cannot be planned; says why and what to do instead."""
    name = type(model).__name__
    if any(map(is_distributed, batch)):
        raise TraceError(
            f"a tensor of the batch is a DTensor; pass this rank's part, and let submodules of "
            f"{name} distribute it (PrepareModuleInput, or input_layouts= of ColwiseParallel)"
        )
    if not has_distributed(model):
        return
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
        raise TraceError(
            f"{name} is sharded by FSDP2, which gathers its parameters in hooks that a planned "
            "step does not run: plan before sharding, solve(..., fsdp=N)"
        )
    if has_parallel_style(model):
        raise TraceError(
            f"{name} itself has a parallel style, so that it is called with a DTensor or returns "
            "one; a plan is for a module that is called with this rank's tensors: wrap it in a "
            "module, or give the style to its submodules"
        )
    _refuse_meshes(model)


def _refuse_meshes(model: nn.Module) -> None:
    """Raise TraceError unless all parameters and buffers are evenly distributed over one 1-d mesh.

    The model has at least one DTensor.
    """
    if not torch.distributed.is_initialized():
        raise TraceError(
            f"parameters of {type(model).__name__} are DTensors, and no process group is "
            "initialised: call torch.distributed.init_process_group first. To plan for a rank "
            'without the others, use its "fake" backend (docs/tensor_parallel.md)'
        )
    named: dict[str, Any] = dict((*model.named_parameters(), *model.named_buffers()))
    found = {name: each for name, each in named.items() if is_distributed(each)}
    first = next(iter(found))
    mesh = found[first].device_mesh
    for name, tensor in found.items():
        other = tensor.device_mesh
        if other.ndim != 1:
            raise TraceError(
                f"{name} is distributed over a mesh of {other.ndim} dimensions "
                f"{tuple(other.shape)}; plans are for tensor parallelism over one: "
                "parallelize_module(model, mesh['tp'], ...). For FSDP2 over the other one plan "
                "before sharding, solve(..., fsdp=N)"
            )
        if other != mesh:
            raise TraceError(
                f"{first} and {name} are distributed over different meshes; a plan is for one "
                "group of ranks"
            )
        (placement,) = tensor.placements
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise TraceError(
                f"{name} is placed as {placement!r}; a plan is for parameters that are Shard or "
                "Replicate"
            )
        n_rows, n_ranks = tensor.shape[placement.dim], mesh.size()
        if n_rows % n_ranks:
            raise MeshError(
                f"dimension {placement.dim} of {name} has size {n_rows}, which {n_ranks} ranks do "
                "not divide: their parts, and so their plans, would differ. Choose sizes that are "
                "multiples of the number of ranks"
            )
    if mesh.get_coordinate() is None:
        raise TraceError(
            f"this process is not a rank of the mesh {mesh}; plan and run on its ranks only"
        )
