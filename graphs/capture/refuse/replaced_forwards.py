"""Refuses models in which a module's forward has been replaced: compiled, planned already, or an
object that may keep something from call to call."""

from __future__ import annotations

import functools
import types

import torch
from torch import nn

from graphs.model_calls import TraceError

_WITHOUT_STATE = (
    *(nn.Module, type, types.FunctionType, types.BuiltinFunctionType),
    torch.ScriptMethod,  # the forward of every module of torch.jit.script
)


def refuse_replaced_forwards(model: nn.Module) -> None:
    """Raise TraceError if the model or a submodule is compiled or already planned."""
    from torch._dynamo import OptimizedModule  # takes a second to import

    name = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            part = f"its submodule {path} is" if path else "the module is"
            raise TraceError(
                f"{name} cannot be traced: {part} compiled by torch.compile; pass the original "
                "module (model._orig_mod)"
            )
    refuse_plans(model)


def refuse_plans(model: nn.Module, *, also_its_own: bool = True) -> None:
    """Raise TraceError if a plan has replaced a `forward` that would be traced.

    Such a replacement has a method `why_not_traced(title)` that returns the reason.

    also_its_own: whether a plan on the model itself is refused; False if that plan is tracing.
    """
    for path, module in model.named_modules():
        why_not = getattr(module.__dict__.get("forward"), "why_not_traced", None)
        if why_not is not None and (path or also_its_own):
            title = f"its submodule {path}" if path else "it"
            raise TraceError(f"{type(model).__name__} cannot be traced: {why_not(title)}")


def refuse_forwards_with_state(model: nn.Module) -> None:
    """Raise TraceError if the forward of a submodule is an object, or a method of one, that is no
    module: a planned step would not see what the object keeps, or what is set on it, between calls.
    """
    for path, module in model.named_modules():
        forward = module.__dict__.get("forward") if path else None
        while isinstance(forward, functools.partial):
            forward = forward.func
        owner = forward.__self__ if isinstance(forward, types.MethodType) else forward
        if owner is not None and not isinstance(owner, _WITHOUT_STATE):
            raise TraceError(
                f"{type(model).__name__} cannot be planned: the forward of its submodule {path!r} "
                f"has been replaced by an object of type {type(owner).__name__}, and a planned "
                "step would not see what that object keeps or what is set on it between calls (the "
                "layer that AdaptiveLayerLoss of sentence-transformers chooses). Train without a "
                "plan while it is there"
            )
