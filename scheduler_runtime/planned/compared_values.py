"""Plain values, containers and objects in a form to be compared before each call.

What forward can read in attributes of modules and of their classes is compared

- by value: numbers, strings and other plain values, also nested in containers, and objects that
  hold only such (configs, dataclasses, namespaces);
- by form: tensors (their values have guards of their own);
- by identity: functions, classes, modules and all other objects.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from graphs.model_calls import PLAIN_TYPES, gradient_dtype

MAX_ENTRIES = 1000
"""Maximum number of entries of a container that are compared; of a longer one, only the length is.
"""
LARGE_BYTES = 2**20
"""Largest array in an attribute whose content is compared; a larger one is compared by identity."""
COMMON: frozenset[type] = frozenset({bool, int, str, types.NoneType})
"""The most common plain types, compared with `==`; looking in a set is faster than in `_PLAIN`."""
_PLAIN = (*PLAIN_TYPES, np.generic, range, slice, enum.Enum, PurePath)
"""A trace sets no attribute to a value of the last five types (`graphs.capture.filled_once`), but
`forward` may read one."""
_CODE = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_TENSORS: frozenset[type] = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_OF_CLASSES: frozenset[type] = frozenset(
    {types.FunctionType, staticmethod, classmethod, property, functools.cached_property}
)
"""What classes consist of mainly; compared by identity."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype, device, the dtype of its gradient (False: it gets none), and a class
    of the user."""
    strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    kind = None if type(tensor) in _TENSORS else type(tensor)
    gradient = tensor.requires_grad and gradient_dtype(tensor)
    return tensor.shape, strides, tensor.dtype, tensor.device, gradient, kind


def argument(value: Any) -> Any:
    """An argument that is not a tensor, for comparison; the numbers of an array are constants of
    the program, so they are compared whatever its size."""
    return _array(value) if isinstance(value, np.ndarray) else setting(value, set())


class ByIdentity:
    """An object that is compared by identity, for as long as it exists (`weakly`)."""

    def __init__(self, value: Any) -> None:
        self._get = weakly(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByIdentity):
            return False
        value = self._get()
        return value is not None and value is other._get()

    __hash__ = None  # type: ignore[assignment]


class _NotPlainError(Exception):
    """A value is not plain."""


_is_plain: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(
    lambda kind: issubclass(kind, _PLAIN)
)
"""Whether values of a class are plain; cached, since `issubclass` for every value takes long."""


def setting(value: Any, seen: set[int]) -> Any:
    """The value of an attribute, in a form to be compared.

    seen: ids of the mutable objects that `kind_of` has read so far.
    """
    kind = type(value)
    if kind in COMMON:  # most values
        return kind, value
    if (
        kind is tuple
        and len(value) <= MAX_ENTRIES
        and COMMON.issuperset(kinds := tuple(map(type, value)))
    ):
        return kinds, value
    try:
        return _read(value, seen, in_object=False)
    except _NotPlainError:
        return type(value), ByIdentity(value)


def _read(value: Any, seen: set[int], *, in_object: bool) -> Any:
    """The content of a value, in a form to be compared.

    in_object: whether the value is inside of an object. If so, anything that is not plain makes the
        whole object be compared by identity; an item of a container only affects itself.

    Raises _NotPlainError if the value can only be compared by identity.
    """
    kind = type(value)
    if kind in COMMON:
        return kind, value
    if _is_plain(kind):
        return _plain(value)
    if isinstance(value, _CODE):
        return value
    if isinstance(value, type):  # a class that is a config: `class Config: dropout = 0.1`
        return value, plain_of_class(value)
    if isinstance(value, np.ndarray):
        return _array(value) if value.nbytes <= LARGE_BYTES else ByIdentity(value)
    if isinstance(value, torch.Tensor) and not in_object:
        # values have guards of their own (`HeldTensor`); forward may read the form alone
        return kind, None if value.is_nested else form(value)
    if isinstance(value, weakref.ref) and not in_object:
        return kind  # nn.RNN recreates references to its weights
    if isinstance(value, functools.partial):
        value = (value.func, value.args, value.keywords)
    if not isinstance(value, tuple | set | frozenset):
        if id(value) in seen:  # the config that all layers share, or a list that contains itself
            return id(value)
        if not isinstance(value, CONTAINERS):
            # a copy of `seen`: if the object turns out not to be plain, what was read of it does
            # not count as seen
            tried = {*seen, id(value)}
            state = tuple(
                (k, _read(v, tried, in_object=True)) for k, v in _attributes_of(value).items()
            )
            seen |= tried
            return kind, state
        seen.add(id(value))
    if isinstance(value, tuple):  # its own entries: a subclass may refuse `len` (e3nn's Irreps)
        value = tuple.__getitem__(value, slice(None))
    if len(value) > MAX_ENTRIES:
        return kind, len(value)
    read = functools.partial(_read, in_object=True) if in_object else setting
    if isinstance(value, dict):
        keys = (_plain(key) if _is_plain(type(key)) else id(key) for key in list(value))
        return kind, tuple(zip(keys, [read(v, seen) for v in list(value.values())], strict=True))
    items = sorted(value, key=hash) if isinstance(value, set | frozenset) else list(value)
    return kind, tuple([read(item, seen) for item in items])


def _plain(value: object) -> Any:
    """A plain value, for comparison: with its type, so that 1 is not True, and floats written out,
    so that NaN equals itself and 0.0 is not -0.0."""
    return type(value), value if type(value) in COMMON else repr(value)


def plain_of_class(kind: type) -> tuple[Any, ...]:
    """Plain attributes of a class and of its bases, except PyTorch's own."""
    own = _attributes_of_class(kind)
    return tuple((name, _plain(value)) for name, value in own if _is_plain(type(value)))


def class_settings(kind: type, seen: set[int]) -> tuple[Any, ...]:
    """All attributes of a module's class and of its bases, except PyTorch's own: also methods,
    which may be replaced, and containers, which may be changed."""
    return tuple(
        (name, value if type(value) in _OF_CLASSES else _class_setting(value, seen))
        for name, value in _attributes_of_class(kind)
    )


def _class_setting(value: Any, seen: set[int]) -> Any:
    # the guards of tensors' values do not know those of classes
    return ByIdentity(value) if isinstance(value, torch.Tensor) else setting(value, seen)


def weakly(value: Any) -> Callable[[], Any]:
    """Returns the object when called, for as long as it exists, and None afterwards.

    It is held by a weak reference where Python allows that, so that a program does not keep objects
    (and their tensors) alive that the model has dropped."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _attributes_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    return (
        (name, value)
        for each in kind.__mro__
        if not each.__module__.startswith(("torch.", "builtins"))
        for name, value in vars(each).items()
        if not name.startswith("__")
    )


def _array(array: np.ndarray[Any, Any]) -> Any:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
    return type(array), array.dtype.str, array.shape, digest


def _attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object, from its dict and slots; _NotPlainError if it has neither."""
    if isinstance(value, torch.Tensor):
        raise _NotPlainError
    state = getattr(value, "__dict__", None)
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not isinstance(state, dict) and not slots:
        raise _NotPlainError
    return {**state, **slots} if isinstance(state, dict) else slots


def hook_setting(hook: Callable[..., Any], seen: set[int]) -> Any:
    """A hook of a submodule, for comparison: by its code, since a new closure may be registered in
    every step, or by the object that is called (weight_norm's, with its dimension)."""
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return setting(hook, seen) if code is None else code
