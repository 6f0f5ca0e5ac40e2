"""A key of a module that is known before it is traced: modules with equal keys trace alike.

The key has the module's class and all of its attributes, those of submodules included: numbers and
strings by value; parameters by dtype, shape, strides and device; buffers likewise and, unless they
are on the meta device, by content; and which of these are the same object or share memory. A module
gets no key if it holds anything else that may decide what `forward` does, such as an object of
another class or a function with a closure: it may not trace like any other.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from graphs.model_calls import PLAIN_TYPES

MOST_ELEMENTS = 2**16
"""The largest buffer whose content is part of a key; a module with a larger one gets no key."""
_BY_REPR = (float, complex)  # tells -0.0 from 0.0
_BY_VALUE = {*PLAIN_TYPES, torch.Size}.difference(_BY_REPR)
_BY_IDENTITY = (enum.Enum, types.BuiltinFunctionType, type)


class _NoKeyError(Exception):
    """The value may decide what `forward` does, in a way that the key cannot tell."""


def trace_key(*values: Any) -> Hashable | None:
    """The key of a module and the nested values that it is called with; equal keys trace alike.

    None: there is no key.
    """
    try:
        return _key(values, {})
    except _NoKeyError:
        return None


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    """The key of one value; raises _NoKeyError.

    seen: identity of each module, tensor and storage so far -> its number, in order of appearance.
    """
    kind = type(value)
    if kind in _BY_VALUE or isinstance(value, _BY_IDENTITY):
        return kind, value
    if kind in _BY_REPR:
        return kind, repr(value)
    if kind in (dict, OrderedDict):
        return kind, tuple((_key(key, seen), _key(each, seen)) for key, each in value.items())
    if kind in (list, tuple):
        return kind, tuple(_key(each, seen) for each in value)
    if kind in (set, frozenset):
        return kind, frozenset(_key(each, seen) for each in value)
    if kind is types.FunctionType and not (value.__closure__ or vars(value)):
        return kind, value
    if isinstance(value, nn.Module):
        return kind, _number_of(value, seen) or _key(vars(value), seen)
    if kind in (torch.Tensor, nn.Parameter):
        return kind, _number_of(value, seen) or _tensor_key(value, seen)
    raise _NoKeyError


def _number_of(value: Any, seen: dict[int, int]) -> int | None:
    """The number of an object that was seen before; None, and it gets one, if it was not."""
    known = seen.get(id(value))
    seen.setdefault(id(value), len(seen) + 1)
    return known


def _tensor_key(tensor: torch.Tensor, seen: dict[int, int]) -> Hashable:
    has_hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    if tensor.layout is not torch.strided or has_hooks:
        raise _NoKeyError
    storage = tensor.untyped_storage()
    number = seen.setdefault(storage._cdata, len(seen) + 1)
    content: Hashable = None
    if not (isinstance(tensor, nn.Parameter) or tensor.is_meta):
        if tensor.numel() > MOST_ELEMENTS:
            raise _NoKeyError
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return (
        *(tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.storage_offset()),
        *(storage.nbytes(), tensor.requires_grad, number, content, _key(vars(tensor), seen)),
    )
