"""Refuses models in which a module's forward has been replaced: compiled, or planned already."""

from __future__ import annotations

from torch import nn

from graphs.model_calls import TraceError


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
