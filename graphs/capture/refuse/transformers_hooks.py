"""The hooks with which transformers collects hidden states and attentions.

A model that returns `hidden_states` puts a forward hook on its layers when it is first called, and
a mark on itself that it has done so. These hooks hand tensors on within one forward pass and leave
nothing behind, so that a traced step holds all that they do: unlike other hooks of submodules they
need not be refused. After a trace neither the hooks nor the mark must stay: one without the other
would collect nothing, or everything twice.
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
    """Take off what was put on inside."""
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
