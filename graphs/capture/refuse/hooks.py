"""Refuses hooks that a planned step would skip."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from graphs.capture.refuse.side_effects import SideEffectError
from graphs.capture.refuse.traced_hooks import is_own, is_traced

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


class HookError(SideEffectError):
    """A submodule has a hook that a planned step would not run."""


class PairedHooksError(HookError):
    """A submodule has hooks of both passes, which may count the passes: no checkpoints either."""


def global_hooks() -> tuple[Any, ...]:
    """The hooks that run for every module of the process, as code objects for comparison.

    They are traced with the module, so what they change is part of the program. They are compared
    by code, since a profiler may register a new closure in every step. Hooks that a trace registers
    are left out, and so are PyTorch's own (of its FLOP counter), which change nothing.
    """
    hooks = [
        h for attribute in HOOKS for h in getattr(nn.modules.module, f"_global{attribute}").values()
    ]
    functions = [getattr(h, "__func__", h) for h in hooks if not getattr(h, "is_of_trace", False)]
    own = [f for f in functions if not str(getattr(f, "__module__", "")).startswith("torch.")]
    return tuple(getattr(function, "__code__", function) for function in own)


def has_refused_hook(module: nn.Module) -> bool:
    """Whether the module itself has a hook that a trace need not record."""
    return any(not all(map(is_traced, getattr(module, attribute).values())) for attribute in HOOKS)


def has_paired_hooks(module: nn.Module) -> bool:
    """Whether the module itself has hooks of the forward pass and of the backward pass."""
    kinds = (_FORWARD_HOOKS, _BACKWARD_HOOKS)
    return all(any(getattr(module, attribute) for attribute in kind) for kind in kinds)


def refuse_hooks(model: nn.Module, *, except_in: Iterable[nn.Module] = ()) -> None:
    """Raise HookError if a submodule has a hook that a trace does not record.

    Hooks of the model itself are fine: they run around the planned step.

    except_in: opaque modules, in which a planned step does run the hooks, those of submodules
        included.
    """
    allowed = {model, *(submodule for module in except_in for submodule in module.modules())}
    for name, module in model.named_modules():
        for attribute, kind in HOOKS.items():
            hooks = [h for h in getattr(module, attribute).values() if not is_traced(h)]
            if attribute in _FORWARD_HOOKS:
                hooks = [h for h in hooks if not is_own(h, model)]
            if hooks and module not in allowed:
                if has_paired_hooks(module):
                    raise PairedHooksError(
                        f"submodule {name!r} has forward and backward hooks. Those that take the "
                        "input of a layer to its backward pass (the per-sample gradients of "
                        "Opacus) need one forward pass per backward pass, and recomputation runs "
                        "two. Train without a plan; smaller batches take less memory (the "
                        "BatchMemoryManager of Opacus)"
                    )
                raise HookError(
                    f"submodule {name!r} has a {kind}, which a planned step would not run; "
                    "remove it, register it on the model itself or on parameters, or compute it in "
                    "forward"
                )
