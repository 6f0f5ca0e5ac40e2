"""What can be said of a module before it is traced: modules of which the same is said trace alike.

That is its class and all of its attributes: of its submodules in turn, numbers and words by value,
parameters by form, buffers by form and, where they have any, by content; and which of them are the
same object, or share memory. Of whatever else may decide what `forward` does nothing can be said,
such as an object of another class, or a function that carries values: then the module is like no
other.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

MOST_ELEMENTS = 2**16
"""Of a buffer whose content is compared."""
_VALUES = (bool, int, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout)
_BY_IDENTITY = (enum.Enum, types.BuiltinFunctionType, type)


class _NothingIsKnownError(Exception):
    """Of this value."""


def known_by(*values: Any) -> Hashable | None:
    """Equal for modules, and nested values that they are called with, which trace alike.

    None: like no other.
    """
    try:
        return _of(values, {})
    except _NothingIsKnownError:
        return None


def _of(value: Any, seen: dict[int, int]) -> Hashable:
    """seen: identities of modules, tensors and storages, numbered as they come."""
    kind = type(value)
    if value is None or kind in _VALUES or isinstance(value, _BY_IDENTITY):
        return kind, value
    if kind is float:
        return kind, repr(value)  # tells -0.0 from 0.0
    if kind in (dict, OrderedDict):
        return kind, tuple((_of(key, seen), _of(each, seen)) for key, each in value.items())
    if kind in (list, tuple):
        return kind, tuple(_of(each, seen) for each in value)
    if kind in (set, frozenset):
        return kind, frozenset(_of(each, seen) for each in value)
    if kind is types.FunctionType and not (value.__closure__ or vars(value)):
        return kind, value
    if isinstance(value, nn.Module):
        return kind, _number(value, seen) or _of(vars(value), seen)
    if kind in (torch.Tensor, nn.Parameter):
        return kind, _number(value, seen) or _of_tensor(value, seen)
    raise _NothingIsKnownError


def _number(value: Any, seen: dict[int, int]) -> int | None:
    """Of what has been seen before; None: it has not."""
    known = seen.get(id(value))
    seen.setdefault(id(value), len(seen) + 1)
    return known


def _of_tensor(tensor: torch.Tensor, seen: dict[int, int]) -> Hashable:
    has_hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    if tensor.layout is not torch.strided or has_hooks:
        raise _NothingIsKnownError
    storage = tensor.untyped_storage()
    number = seen.setdefault(storage._cdata, len(seen) + 1)
    content: Hashable = None
    if not (isinstance(tensor, nn.Parameter) or tensor.is_meta):
        if tensor.numel() > MOST_ELEMENTS:
            raise _NothingIsKnownError
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return (
        *(tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset()),
        *(storage.nbytes(), tensor.requires_grad, number, content, _of(vars(tensor), seen)),
    )
