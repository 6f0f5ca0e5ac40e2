"""A module as FSDP2 runs it under a MixedPrecisionPolicy: in other dtypes than it is stored in.

FSDP2 casts a group's parameters when it gathers them, the arguments of its module before the module
runs, and its results afterwards. This file makes a copy of the model that does the same, so that
its trace contains these casts, and all operators run in the right dtypes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors
from torch.fx.traceback import annotate

from graphs.fsdp import MixedPrecision, Sharding
from graphs.graph import Graph, is_under
from graphs.model_calls import TraceError, bytes_by_dtype, is_distributed, local_part


def in_precision_of(
    policy: MixedPrecision, model: nn.Module, groups: Iterable[str], *, with_values: bool = False
) -> nn.Module:
    """A copy of the model, for tracing, that computes in the dtypes of the policy.

    Its parameters are on the meta device, and it shares the model's buffers. The modules that
    `fully_shard` is called on get subclasses of the same name, whose `forward` casts.

    groups: paths of the modules that `fully_shard` is called on, before the model itself.
    with_values: copy the values of the parameters too, so that the copy can run.

    Raises TraceError if the model cannot be copied, or a module has an instance attribute
    `forward`.
    """
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    dtype = _dtype(policy.param_dtype)
    copy_of = _with_values if with_values else _without_values
    memo |= {id(parameter): copy_of(parameter, dtype) for parameter in model.parameters()}
    copied = _copy_of(model, memo)
    paths, names = ("", *groups), [name for name, _ in model.named_parameters()]
    # the groups that own parameters: each belongs to the innermost group around it
    owners = {max((p for p in paths if is_under(name, p)), key=len) for name in names}
    for path in {"", *owners}:
        module = copied.get_submodule(path)
        module.__class__ = _casting_class(type(module), policy, enclosing=path.rpartition(".")[0])
    return copied


def copy_with_values(sharding: Sharding | None, model: nn.Module) -> nn.Module | None:
    """`in_precision_of` with the parameters' values: a part that cannot be traced is run.

    None if the model computes in its own dtypes, or its parameters are distributed.
    """
    policy = None if sharding is None else sharding.mp_policy
    if policy is None or sharding is None or any(map(is_distributed, model.parameters())):
        return None
    return in_precision_of(policy, model, sharding.groups or (), with_values=True)


def _copy_of(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    remedy = "and is traced in other dtypes as a copy of itself: plan without mp_policy, or"
    for path, module in model.named_modules():
        if "forward" in vars(module):  # it may belong to the original
            raise TraceError(
                f"{path or 'the model'} has a forward of its own beside that of its class, "
                f"{remedy} leave out what has replaced it"
            )
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TraceError(f"the model cannot be copied ({error}), {remedy} change that") from error


def with_stored_dtypes(graph: Graph, model: nn.Module) -> Graph:
    """The graph, with the stored dtypes of the parameters recorded in its meta.

    model: the model, of which the graph traced a copy (`in_precision_of`).
    """
    stored_bytes = {name: local_part(p).element_size() for name, p in model.named_parameters()}
    layout = {
        name: entry
        if entry["element_bytes"] == stored_bytes[name]
        else {**entry, "stored_element_bytes": stored_bytes[name]}
        for name, entry in graph.meta.parameter_layout.items()
    }
    meta = replace(graph.meta, parameter_layout=layout, parameter_bytes=bytes_by_dtype(model))
    return replace(graph, meta=meta)


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def _held_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a group holds the parameter in: `dtype`, if both are floating point."""
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


def _without_values(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter like this one on the meta device, in the dtype that the group holds."""
    held = _held_dtype(parameter, dtype)
    part = torch.empty_like(local_part(parameter), dtype=held, device="meta")
    whole = part
    if is_distributed(parameter):
        distributed: Any = parameter
        spec = distributed._spec
        meta = spec.tensor_meta._replace(dtype=part.dtype)
        whole = type(distributed)(part, replace(spec, tensor_meta=meta), requires_grad=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _with_values(parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    """A copy of this parameter, in the dtype that the group holds."""
    values = parameter.detach().to(_held_dtype(parameter, dtype), copy=True)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _casting_class(
    kind: type[nn.Module], policy: MixedPrecision, *, enclosing: str
) -> type[nn.Module]:
    """A subclass whose `forward` casts arguments and results as FSDP2 does for a group.

    enclosing: path of the enclosing module. The casts count as its operators, since FSDP2 runs them
        outside of the group's `forward`.
    """
    inner = kind.forward
    computed = _dtype(policy.param_dtype) if policy.cast_forward_inputs else None
    returned = _dtype(policy.output_dtype)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast_tensors((args, kwargs), computed, enclosing)
        return _cast_tensors(inner(self, *args, **kwargs), returned, enclosing)

    body = {"forward": functools.wraps(inner)(forward), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), body)


def _cast_tensors(values: Any, dtype: torch.dtype | None, enclosing: str) -> Any:
    """The nested values, with floating-point tensors cast to this dtype; None: unchanged. Uses
    FSDP2's own function to find the tensors."""
    if dtype is None:
        return values

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    with annotate({"module_path": enclosing}):
        return _apply_to_tensors(cast, values)
