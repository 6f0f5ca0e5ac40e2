"""What a module is set to, as a value that can be compared: a change asks for another program.

A program is what `forward` did when it was traced. Besides its batch and its tensors (which have
guards of their own, `graphs.capture.as_eager.known_values`), forward reads Python state:
attributes, in the module or in what it holds (a peft layer keeps its scaling in a dict, a model of
transformers its config), of its class, and its own code. All of that is read here before each call:

- plain values (numbers, strings, dtypes) in attributes of modules and of their classes;
- arrays of NumPy, up to LARGE_BYTES by their numbers, beyond that by which array it is;
- lists, tuples, dicts, sets and deques of them, nested, up to MANY entries; but a list of numbers
  or tensors in an attribute that only grows, or is emptied, is a record (of losses, say);
- objects that hold nothing but such values, in a dict or in slots: configs, dataclasses,
  namespaces. An object that holds anything else (a trainer, a logger) is known by its type and by
  which one it is: what is in it changes with every step;
- functions, classes and modules held elsewhere by identity, a class with its plain attributes too,
  and functools.partial by its parts; each module's class and its `forward`;
- settings of torch itself that decide which operators there are.

Not seen: globals of a Python module, environment variables, what a closure has caught, and the
inside of the objects left out. `docs/same_bits.md` says so.
"""

from __future__ import annotations

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
from torch.nn.utils import parametrize

from graphs.capture import TORCHS_OWN, global_hooks

MANY = 1000
"""Entries of a container; one that is longer is known by its length."""
LARGE_BYTES = 2**20
"""Of an array in an attribute: one that is larger is not read before each call."""
_WRITTEN_OUT = (
    float,  # NaN is itself, and 0.0 is not -0.0
    complex,
    np.generic,
    range,
    slice,
    PurePath,  # its slots are filled as it is used
    torch.memory_format,
    torch.layout,
)
"""Plain values that are compared as text."""
_PLAIN = (
    *_WRITTEN_OUT,
    *(bool, int, str, bytes, enum.Enum, torch.dtype, torch.device, types.NoneType),
)
_COMMON = frozenset({bool, int, str, types.NoneType})
"""Most of what there is to read: a set is faster to look in than `_PLAIN`."""
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_BY_IDENTITY = (
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
_ELSEWHERE = (torch.Tensor, weakref.ref)
"""Tensors have guards of their own; nn.RNN lists references to its weights anew as they are set."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _NoSettingError(Exception):
    """Something that is no setting."""


class Records:
    """Which lists are records: what each held at the last call, and how often it was changed."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], tuple[tuple[Any, ...], int]] = {}

    def version(self, place: tuple[int, str], value: list[Any], read: Any) -> int:
        """The same number for as long as the list is only written on."""
        inside = read[1] if isinstance(read[1], tuple) else ()
        before, version = self._last.get(place, (inside, 0))
        grown = len(inside) >= len(before) and inside[: len(before)] == before
        new = value[len(before) :] if grown else value
        if not (grown or not value) or not all(_is_number(item) for item in new):
            version += 1
        self._last[place] = inside, version
        return version


def settings_of(model: nn.Module, records: Records) -> tuple[Any, ...]:
    """A hashable value that is equal as long as nothing in the list above changes."""
    seen: set[int] = set()
    modules = modules_of(model)
    classes = {kind: _of_class(kind) for kind in {type(module) for module in modules}}
    return tuple(
        (
            type(module),
            type(module).forward,
            classes[type(module)],
            module.training,
            tuple(len(getattr(module, hooks)) for hooks in _HOOKS),
            tuple(_attributes(module, seen, records, is_root=module is model)),
        )
        for module in modules
    )


def torchs_settings() -> tuple[Any, ...]:
    """Settings of torch itself that decide while tracing which operators there are: dtype and
    device of new tensors, which kernels attention may take, hooks of all modules, and whether
    parametrized weights are shared between calls."""
    modes = torch.overrides._get_current_function_mode_stack()
    return (
        tuple((type(mode), getattr(mode, "device", None)) for mode in modes),
        global_hooks(),
        parametrize._cache_enabled > 0,
        torch.get_default_dtype(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def argument_state(value: Any) -> Any:
    """The same of an argument that is no tensor, and no container that a call is opened into.

    An object is known by identity as well: what is hidden further inside of it cannot be seen. An
    array of NumPy is known by its numbers: they are constants of the traced step.
    """
    if isinstance(value, np.ndarray):
        return _numbers(value)
    if isinstance(value, (*_PLAIN, *_BY_IDENTITY, set, frozenset)):
        return _item(value, set(), within_object=False)
    state = _state(value)
    if state is None:
        return type(value), repr(value)
    seen = {id(value)}
    inside = tuple((k, _item(v, seen, within_object=False)) for k, v in state.items())
    return type(value), id(value), inside


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` has, in another order; without a generator for each level of it."""
    found = {id(model): model}
    stack = [model]
    while stack:
        for child in stack.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                stack.append(child)
    return list(found.values())


def _attributes(
    module: nn.Module, seen: set[int], records: Records, *, is_root: bool
) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in TORCHS_OWN or (is_root and name == "forward"):  # there the plan itself stands
            continue
        try:
            read = _read(value, seen, within_object=False)
        except _NoSettingError:
            read = type(value), _Known(value)
        if type(value) is list and isinstance(read, tuple) and all(map(_is_number, value)):
            read = list, records.version((id(module), name), value, read)
        yield name, read


def _of_class(kind: type) -> tuple[Any, ...]:
    """Plain attributes of the module's classes, up to PyTorch's own."""
    return tuple(
        (name, _plain(value))
        for each in kind.__mro__
        if not each.__module__.startswith(("torch.", "builtins"))
        for name, value in vars(each).items()
        if isinstance(value, _PLAIN) and not name.startswith("__")
    )


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or isinstance(value, torch.Tensor)


def _plain(value: object) -> Any:
    """With its type: 1 is not True."""
    return type(value), repr(value) if isinstance(value, _WRITTEN_OUT) else value


class _Known:
    """Known by which object it is: equal to another one of the same object, while that is there.

    It does not keep the object, where Python allows that: what a program was made for would hold
    the tensors of objects that the model has dropped.
    """

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._of: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._of = lambda: value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Known) and (it := self._of()) is not None and it is other._of()

    def __hash__(self) -> int:
        return self._hash


def _numbers(array: np.ndarray[Any, Any]) -> Any:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
    return type(array), array.dtype.str, array.shape, digest


def _state(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, in its dict and in its slots; None: it has none to be read."""
    state = getattr(value, "__dict__", None)
    slots = [slot for slot in _slots_of(value.__class__) if hasattr(value, slot)]
    if not isinstance(state, dict) and not slots:
        return None
    found = dict(state) if isinstance(state, dict) else {}
    return found | {slot: getattr(value, slot) for slot in slots}


@functools.cache
def _slots_of(kind: type) -> tuple[str, ...]:
    return tuple(slot for each in kind.__mro__ for slot in _own_slots(each))


def _own_slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    private = f"_{kind.__name__.lstrip('_')}"
    for slot in (slots,) if isinstance(slots, str) else tuple(slots):
        if slot not in ("__dict__", "__weakref__"):
            hidden = slot.startswith("__") and not slot.endswith("__")
            yield f"{private}{slot}" if hidden else slot


def _read(value: Any, seen: set[int], *, within_object: bool) -> Any:
    if type(value) in _COMMON:
        return type(value), value
    if isinstance(value, _PLAIN):
        return _plain(value)
    if isinstance(value, _CONTAINERS):
        return _container(value, seen, within_object=within_object)
    if isinstance(value, type):  # a class that is a config: `class Config: dropout = 0.1`
        return value, _of_class(value)
    if isinstance(value, functools.partial):
        return _partial(value, seen, within_object=within_object)
    if isinstance(value, _BY_IDENTITY):
        return value  # compared by identity, and kept, so that no other takes its place in memory
    if isinstance(value, np.ndarray):
        return _numbers(value) if value.nbytes <= LARGE_BYTES else _Known(value)
    state = None if isinstance(value, torch.Tensor) else _state(value)
    if state is None:
        if within_object or not isinstance(value, _ELSEWHERE):
            raise _NoSettingError
        return type(value)
    if id(value) in seen:
        return id(value)
    seen.add(id(value))
    inside = tuple((k, _read(v, seen, within_object=True)) for k, v in state.items())
    return type(value), inside


def _partial(value: functools.partial[Any], seen: set[int], *, within_object: bool) -> Any:
    """What it calls and with what: neither is among its attributes."""
    parts = (value.func, value.args, value.keywords)
    return type(value), tuple(_item(part, seen, within_object=within_object) for part in parts)


def _container(value: Any, seen: set[int], *, within_object: bool) -> Any:
    if len(value) > MANY:
        return type(value), len(value)
    if id(value) in seen:  # may hold itself
        return id(value)
    if isinstance(value, dict):
        seen.add(id(value))
        items = (
            (_key(k), _item(v, seen, within_object=within_object)) for k, v in list(value.items())
        )
        return type(value), tuple(items)
    if isinstance(value, list | deque):
        seen.add(id(value))
    found = [_item(item, seen, within_object=within_object) for item in list(value)]
    return type(value), frozenset(found) if isinstance(value, set | frozenset) else tuple(found)


def _item(value: Any, seen: set[int], *, within_object: bool) -> Any:
    if within_object:
        return _read(value, seen, within_object=True)
    try:
        return _read(value, seen, within_object=False)
    except _NoSettingError:
        return type(value), _Known(value)


def _key(key: Any) -> Any:
    return _plain(key) if isinstance(key, _PLAIN) else id(key)
