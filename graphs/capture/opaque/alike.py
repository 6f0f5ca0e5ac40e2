"""Which modules are expected to fail as one did, so that they become pieces at once.

Each failure costs a whole trace. Modules of a model's own class run the same line, so all of them
go together. PyTorch's classes do something else in each place: one nn.Linear may be given a tensor
that cannot be traced while all others are fine. Of these, at once go only those whose failure is
due to the class itself: attention with its fast path, and nn.LSTM, one operator of the CPU. Others
go together once two have failed for the same reason at the same place of two layers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import torch
from torch import nn

from graphs.capture.opaque.observe import all_put_back, run
from graphs.model_calls import Call

_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def alike(
    model: nn.Module, call: Call, device: torch.device, path: str, failed_before: Sequence[str]
) -> list[str]:
    """The paths of the module that failed and of those that are expected to, if they are called.

    failed_before: paths of modules that failed for the same reason.
    """
    modules = dict(model.named_modules())
    kind = _kind(modules[path])
    if kind is not None:
        found = [p for p, module in modules.items() if p and _kind(module) == kind]
    else:
        same = [p for p, m in modules.items() if _settings(m) == _settings(modules[path])]
        places = [_place(path, other) for other in failed_before if other in same]
        found = [p for p in same if p == path or any(place.fullmatch(p) for place in places)]
    if len(found) == 1:
        return found
    called = _called(model, call, device, [modules[p] for p in found])
    return [p for p in found if p == path or modules[p] in called]


def _kind(module: nn.Module) -> Hashable | None:
    """Equal for modules that fail for what their class does; None: that depends on the place."""
    if isinstance(module, _ATTENTION):
        return type(module), module.training, any(p.requires_grad for p in module.parameters())
    if isinstance(module, nn.LSTM):  # with projections, or in float64, it is not one operator
        return type(module), bool(module.proj_size), module.weight_ih_l0.dtype
    return None if type(module).__module__.startswith("torch.") else (type(module),)


def _settings(module: nn.Module) -> Hashable:
    needs_grad = any(p.requires_grad for p in module.parameters())
    return type(module), module.training, needs_grad


def _place(path: str, other: str) -> re.Pattern[str]:
    """The path with any number where the other has another one; as it is if names differ."""
    names, others = path.split("."), other.split(".")
    parts = [re.escape(name) for name in names]
    if len(names) == len(others):
        differ = [i for i, name in enumerate(names) if name != others[i]]
        if all(names[i].isdigit() and others[i].isdigit() for i in differ):
            for i in differ:
                parts[i] = r"\d+"
    return re.compile(r"\.".join(parts))


def _called(
    model: nn.Module, call: Call, device: torch.device, modules: Sequence[nn.Module]
) -> set[nn.Module]:
    """Those that one forward pass calls: one that is not cannot be a piece."""
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _args: called.add(module))
        for module in modules
    ]
    try:
        with all_put_back(model, device):
            run(model, call)
    finally:
        for hook in hooks:
            hook.remove()
    return called
