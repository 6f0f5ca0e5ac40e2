"""Names of a model's arguments, parameters and buffers.

Arguments are named as in forward's signature: "x", "batch['labels']".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphs.model_calls import nested
from graphs.model_calls.call import HOLE, Call, signature_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def named_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for all parameters and buffers.

    A tensor that several attributes hold (tied weights) comes under each of their names. A module
    that occurs several times comes only under its first name.
    """
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def title_of(module: nn.Module) -> str:
    """What messages call a module: what torch calls it in its repr, usually its class."""
    return str(module._get_name())  # type: ignore[no-untyped-call]


def tensor_names(call: Call, model: nn.Module) -> list[str]:
    """The name in forward of each tensor of the call."""
    return [name for name, item in _named_leaves(call, model) if item is HOLE]


def plain_arguments(call: Call, model: nn.Module) -> dict[str, str]:
    """Name -> text of each argument that is not a tensor, except those equal to their default."""
    signature = signature_of(model.forward)
    defaults: dict[str, Any] = {}
    if signature is not None:
        defaults = {name: each.default for name, each in signature.parameters.items()}
    found: dict[str, str] = {}
    for name, item in _named_leaves(call, model):
        default = defaults.get(name, inspect.Parameter.empty)
        is_plain = isinstance(item, nested.PLAIN_TYPES)
        is_equal = is_plain and type(item) is type(default) and bool(item == default)
        if item is not HOLE and item is not default and not is_equal:
            found[name] = repr(item)[:80] if is_plain else f"a {type(item).__name__}"
    return found


def _named_leaves(call: Call, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) for each leaf of the call's arguments; HOLE in place of tensors."""
    signature = signature_of(model.forward)
    parameters = [] if signature is None else signature.parameters.values()
    positional = [each.name for each in parameters if each.kind in _POSITIONAL]
    for item, path in zip(call.rest, nested.paths(call.spec), strict=True):
        kind, first, *inner = path
        if kind.idx == 1:  # among the keyword arguments
            name = str(getattr(first, "key", ""))
        elif first.idx < len(positional):
            name = positional[first.idx]
        else:
            name = f"number {first.idx + 1}"
        yield name + pytree.keystr(tuple(inner)), item
