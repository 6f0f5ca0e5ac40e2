"""Finds modules that are expected to fail like one that failed, to make all opaque at once.

Each failure costs a whole trace. Modules of a user's class run the same line of code, so all of
that class are expected to fail. Modules of PyTorch's classes depend on where they are used: one
nn.Linear may get a tensor that cannot be traced while all others are fine. Only two of PyTorch's
classes fail by themselves: attention on its fast path, and nn.LSTM, which is one operator on the
CPU. Modules of its other classes are expected to fail once two of them have failed for the same
reason, at the same place in two layers.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import torch
from torch import nn

from graphs.capture.opaque.real_forward import model_restored, run_forward
from graphs.model_calls import Call

_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def paths_failing_alike(
    model: nn.Module, call: Call, device: torch.device, path: str, failed_before: Sequence[str]
) -> list[str]:
    """The paths of the module that failed, and of called modules that are expected to fail too.

    path: the module that failed.
    failed_before: paths of modules that failed earlier for the same reason.
    """
    modules = dict(model.named_modules())
    kind = _failure_key(modules[path])
    if kind is not None:
        found = [p for p, module in modules.items() if p and _failure_key(module) == kind]
    else:
        same_settings = [
            p for p, m in modules.items() if _class_and_mode(m) == _class_and_mode(modules[path])
        ]
        patterns = [_path_pattern(path, other) for other in failed_before if other in same_settings]
        found = [
            p
            for p in same_settings
            if p == path or any(pattern.fullmatch(p) for pattern in patterns)
        ]
    if len(found) == 1:
        return found
    called = _called_modules(model, call, device, [modules[p] for p in found])
    return [p for p in found if p == path or modules[p] in called]


def _failure_key(module: nn.Module) -> Hashable | None:
    """A key that is equal for modules which fail together, because of their class.

    None: whether the module fails depends on where it is used.
    """
    if isinstance(module, _ATTENTION):
        return type(module), module.training, any(p.requires_grad for p in module.parameters())
    if isinstance(module, nn.LSTM):  # with projections, or in float64, it is not one operator
        return type(module), bool(module.proj_size), module.weight_ih_l0.dtype
    return None if type(module).__module__.startswith("torch.") else (type(module),)


def _class_and_mode(module: nn.Module) -> Hashable:
    """A key that is equal for modules of the same class in the same mode."""
    needs_grad = any(p.requires_grad for p in module.parameters())
    return type(module), module.training, needs_grad


def _path_pattern(path: str, other: str) -> re.Pattern[str]:
    """A pattern for paths like these two: any number at each position where their numbers differ.

    If they differ in more than numbers, the pattern matches only the first path.
    """
    names, others = path.split("."), other.split(".")
    parts = [re.escape(name) for name in names]
    if len(names) == len(others):
        differ = [i for i, name in enumerate(names) if name != others[i]]
        if all(names[i].isdigit() and others[i].isdigit() for i in differ):
            for i in differ:
                parts[i] = r"\d+"
    return re.compile(r"\.".join(parts))


def _called_modules(
    model: nn.Module, call: Call, device: torch.device, modules: Sequence[nn.Module]
) -> set[nn.Module]:
    """Those of the modules that a forward pass calls; the others cannot be opaque parts."""
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _args: called.add(module))
        for module in modules
    ]
    try:
        with model_restored(model, device):
            run_forward(model, call)
    finally:
        for hook in hooks:
            hook.remove()
    return called
