"""Restores what forward registers: buffers, parameters and submodules that were not there before.

A trace runs forward on tensors without values, so what it registers must not stay in the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_KINDS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
_NOT_IN_STATE_DICT = "_non_persistent_buffers_set"


class Registered:
    """The buffers, parameters and submodules of each module of a model, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        # a scripted module cannot register anything, and its dicts are none
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._before = [
            (module, attribute, dict(vars(module)[attribute]))
            for module in modules
            for attribute in _KINDS
        ]
        self._not_saved = [(module, set(vars(module)[_NOT_IN_STATE_DICT])) for module in modules]

    def new_buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """(module, name, tensor) of each buffer that was not there before."""
        return [
            (module, name, value)
            for module, attribute, before in self._before
            if attribute == "_buffers"
            for name, value in vars(module)[attribute].items()
            if value is not None and before.get(name) is None
        ]

    def restore(self) -> list[tuple[nn.Module, str, str]]:
        """Restore all of them; returns (module, kind, name) of each that was there no longer, or
        was not there before."""
        changed = []
        for module, attribute, before in self._before:
            now: dict[str, Any] = vars(module)[attribute]
            differing = [n for n in {**before, **now} if now.get(n) is not before.get(n)]
            if differing or [*now] != [*before]:
                now.clear()
                now.update(before)
            changed += [(module, _KINDS[attribute], name) for name in differing]
        for module, not_saved in self._not_saved:
            vars(module)[_NOT_IN_STATE_DICT].clear()
            vars(module)[_NOT_IN_STATE_DICT].update(not_saved)
        return changed
