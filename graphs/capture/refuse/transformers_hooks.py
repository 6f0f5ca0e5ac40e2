"""The hooks with which transformers collects hidden states and attentions.

A model that returns `hidden_states` registers forward hooks on its layers in its first call, and
marks itself as having done so. These hooks pass tensors on within one forward pass and have no
other effect, so a trace records all that they do: unlike other hooks of submodules they need not be
refused. After a trace both the hooks and the mark must be removed: one without the other would
collect nothing, or everything twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_MODULE = "transformers.utils.output_capturing"
_MARK = "_output_capturing_hooks_installed"


def is_capturing(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) == _MODULE


@contextlib.contextmanager
def capturing_hooks_as_before(model: nn.Module) -> Iterator[None]:
    """Remove such hooks and marks that were added inside."""
    before = {module: set(module._forward_hooks) for module in model.modules()}
    marked = {module for module in before if _MARK in vars(module)}
    try:
        yield
    finally:
        for module, known in before.items():
            for key, hook in list(module._forward_hooks.items()):
                if key not in known and is_capturing(hook):
                    del module._forward_hooks[key]
            if module not in marked:
                vars(module).pop(_MARK, None)
