"""Guards: everything besides tensor values that a program depends on, compared before each call.

A program is what `forward` did when it was traced. Before each call, `kind_of` reads what forward
can see; if no program was made for the same, the call needs a new one. It reads

- the form (shape, strides, dtype, device) of the batch, parameters and buffers; arguments that are
  not tensors; autocast;
- global settings of torch that decide which operators run, and global module hooks;
- for each module its class, its `forward`, its training flag and the number of its hooks;
- plain values (numbers, strings, dtypes, ...) in attributes of modules and of their classes, also
  nested in lists, tuples, dicts, sets and deques (peft keeps its scaling in a dict), and there the
  form of tensors;
- objects that hold only plain values: configs, dataclasses, namespaces. An object that holds
  anything else (a trainer, a logger) is compared by identity, since it may change in every step;
- functions, classes and modules held in other places, by identity.

Tensor values that forward read as numbers have guards of their own
(`graphs.capture.as_eager.known_values`). `docs/bitwise_identical.md` lists what no guard sees.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from graphs.capture import HOOKS, MODULE_ATTRIBUTES, global_hooks, shared_storages
from graphs.model_calls import PLAIN_TYPES, Call

MAX_ENTRIES = 1000
"""Maximum number of entries of a container that are compared; of a longer one, only the length is.
"""
LARGE_BYTES = 2**20
"""Largest array in an attribute whose content is compared; a larger one is compared by identity."""
_COMMON: frozenset[type] = frozenset({bool, int, str, types.NoneType})
"""The most common plain types, compared with `==`; looking in a set is faster than in `_PLAIN`."""
_PLAIN = (*PLAIN_TYPES, np.generic, range, slice, enum.Enum, PurePath)
"""A trace sets no attribute to a value of the last five types (`graphs.capture.filled_once`), but
`forward` may read one."""
_CODE = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


def kind_of(model: nn.Module, call: Call, *, ignored: Collection[tuple[str, str]] = ()) -> Any:
    """What a program for this call depends on: equal for calls that can share a program.

    ignored: attributes that may have any value, as pairs of a module's path and a name.
    """
    modules = list(model.modules())
    parameters = {
        id(p): p for m in modules for p in m._parameters.values() if p is not None
    }.values()
    buffers = (b for m in modules for b in m._buffers.values() if b is not None)
    device = next((p.device.type for p in parameters), "cpu")
    modes = torch.overrides._get_current_function_mode_stack()
    return (
        tuple(map(_form, call.tensors)),
        shared_storages(call.tensors) if len(call.tensors) > 1 else (),
        tuple(map(_argument, call.rest)),
        call.spec,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
        tuple((type(mode), getattr(mode, "device", None)) for mode in modes),
        global_hooks(),
        parametrize._cache_enabled > 0,
        torch.get_default_dtype(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        tuple(map(_form, parameters)),
        tuple(map(_form, buffers)),
        settings_of(model, modules, ignored),
    )


_TITLES = (
    *("the shapes, types or devices of the arguments", "which arguments share memory"),
    *("an argument that is not a tensor", "the structure of the arguments"),
    *("autocast", "autocast's cache", "a function mode of torch (its default device, say)"),
    *("the hooks of all modules", "the cache of parametrizations", "torch's default dtype"),
    *("torch.backends.cuda.enable_flash_sdp", "torch.backends.cuda.enable_mem_efficient_sdp"),
    *("torch.backends.cuda.enable_math_sdp", "torch.backends.cuda.enable_cudnn_sdp"),
    *("torch.backends.mha.set_fastpath_enabled", "torch.use_deterministic_algorithms"),
    *("the form of a parameter", "the form of a buffer"),
)
"""Descriptions of the items of `kind_of`, in order, except the last: the settings of modules."""
_OF_MODULE = ("its class", "its forward", "its class's attributes", "train()", "its hooks")


def changed_setting(planned: Any, here: Any, model: nn.Module) -> str | None:
    """Describe the first difference between two `kind_of` this model. None: there is none."""
    *torchs, of_planned = planned
    *torchs_here, of_here = here
    for title, old, new in zip(_TITLES, torchs, torchs_here, strict=True):
        if old != new:
            return f"{title} has changed"
    for (path, _), old, new in zip(model.named_modules(), of_planned, of_here, strict=False):
        owner = f"module {path!r}" if path else type(model).__name__
        for title, before, now in zip(_OF_MODULE, old, new, strict=False):
            if before != now:
                return f"{title} of {owner} has changed"
        (*_, old_own), (*_, new_own) = old, new
        before, now = dict(old_own), dict(new_own)
        for name in dict.fromkeys([*now, *before]):
            if name not in before or name not in now or before[name] != now[name]:
                how = _describe_change(before.get(name), now.get(name))
                return f"attribute {name!r} of {owner} {how}"
    return "the model has other modules" if len(of_planned) != len(of_here) else None


def changed_values(planned: Any, here: Any, model: nn.Module) -> set[tuple[str, str]]:
    """Path of the module and name of each attribute in which two `kind_of` this model differ, and
    which is a number, a string, None, a tensor or a container in both."""
    if len(planned) != len(here) or len(planned[-1]) != len(here[-1]):
        return set()
    found: set[tuple[str, str]] = set()
    for (path, _), (*_, old), (*_, new) in zip(
        model.named_modules(), planned[-1], here[-1], strict=True
    ):
        before = dict(old)
        found.update(
            (path, name)
            for name, value in new
            if name in before and before[name] != value
            if _is_value(before[name]) and _is_value(value)
        )
    return found


def _is_value(setting: Any) -> bool:
    """Of a number, a string, None, a tensor or a container, and not of an object or of code."""
    kind = setting[0] if isinstance(setting, tuple) and len(setting) == 2 else None
    if isinstance(kind, tuple):  # a tuple of plain values
        return True
    return isinstance(kind, type) and issubclass(
        kind, (float, torch.Tensor, *_COMMON, *_CONTAINERS)
    )


def _describe_change(planned: Any, here: Any) -> str:
    """Describe how a setting has changed, numbers and strings with their values.

    planned, here: as `_setting` returns them; None: the attribute does not exist.
    """
    if here is None:
        return "is gone"
    if planned is None:
        return "is new"
    values = [
        each[1] if each[0] is float else repr(each[1])  # a float is written out already
        for each in (here, planned)
        if isinstance(each, tuple) and len(each) == 2 and each[0] in (float, *_COMMON)
    ]
    return f"is {values[0]}, planned for {values[1]}" if len(values) == 2 else "has changed"


def settings_of(
    model: nn.Module, modules: list[nn.Module], ignored: Collection[tuple[str, str]] = ()
) -> tuple[Any, ...]:
    """The Python state of each of these modules of the model, as described above."""
    seen: set[int] = set()  # what is in an ignored attribute counts where else it is found
    at = dict(model.named_modules()) if ignored else {}
    ignored_here = {(id(at.get(path)), name) for path, name in ignored}
    of_class = {kind: _class_settings(kind) for kind in {type(module) for module in modules}}
    return tuple(
        (
            type(module),
            getattr(type(module), "forward", None),  # a ScriptModule has none
            of_class[type(module)],
            module.training,
            tuple(len(getattr(module, hooks)) for hooks in HOOKS),
            tuple(
                (name, _ANY if (id(module), name) in ignored_here else _setting(value, seen))
                for name, value in vars(module).items()
                # the model's own `forward` is the plan itself
                if name not in MODULE_ATTRIBUTES and not (name == "forward" and module is model)
            ),
        )
        for module in modules
    )


class _Any:
    """Equal to everything."""

    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_ANY = _Any()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad


def _argument(value: Any) -> Any:
    """An argument that is not a tensor, for comparison; the numbers of an array are constants of
    the program, so they are compared whatever its size."""
    return _array(value) if isinstance(value, np.ndarray) else _setting(value, set())


class _ByIdentity:
    """An object that is compared by identity, for as long as it exists.

    The object is held by a weak reference where Python allows that, so that a program does not
    keep objects (and their tensors) alive that the model has dropped.
    """

    def __init__(self, value: Any) -> None:
        self._get: Callable[[], Any]
        try:
            self._get = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ByIdentity):
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


def _setting(value: Any, seen: set[int]) -> Any:
    """The value of an attribute, in a form to be compared.

    seen: ids of the mutable objects that `kind_of` has read so far.
    """
    kind = type(value)
    if kind in _COMMON:  # most values
        return kind, value
    if (
        kind is tuple
        and len(value) <= MAX_ENTRIES
        and _COMMON.issuperset(kinds := tuple(map(type, value)))
    ):
        return kinds, value
    try:
        return _read(value, seen, in_object=False)
    except _NotPlainError:
        return type(value), _ByIdentity(value)


def _read(value: Any, seen: set[int], *, in_object: bool) -> Any:
    """The content of a value, in a form to be compared.

    in_object: whether the value is inside of an object. If so, anything that is not plain makes the
        whole object be compared by identity; an item of a container only affects itself.

    Raises _NotPlainError if the value can only be compared by identity.
    """
    kind = type(value)
    if kind in _COMMON:
        return kind, value
    if _is_plain(kind):
        return _plain(value)
    if isinstance(value, _CODE):
        return value
    if isinstance(value, type):  # a class that is a config: `class Config: dropout = 0.1`
        return value, _class_settings(value)
    if isinstance(value, np.ndarray):
        return _array(value) if value.nbytes <= LARGE_BYTES else _ByIdentity(value)
    if isinstance(value, torch.Tensor) and not in_object:
        # values have guards of their own (`HeldTensor`); forward may read the form alone
        return kind, None if value.is_nested else _form(value)
    if isinstance(value, weakref.ref) and not in_object:
        return kind  # nn.RNN recreates references to its weights
    if isinstance(value, functools.partial):
        value = (value.func, value.args, value.keywords)
    if not isinstance(value, tuple | set | frozenset):
        if id(value) in seen:  # the config that all layers share, or a list that contains itself
            return id(value)
        if not isinstance(value, _CONTAINERS):
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
    read = functools.partial(_read, in_object=True) if in_object else _setting
    if isinstance(value, dict):
        keys = (_plain(key) if _is_plain(type(key)) else id(key) for key in list(value))
        return kind, tuple(zip(keys, [read(v, seen) for v in list(value.values())], strict=True))
    items = sorted(value, key=hash) if isinstance(value, set | frozenset) else list(value)
    return kind, tuple([read(item, seen) for item in items])


def _plain(value: object) -> Any:
    """A plain value, for comparison: with its type, so that 1 is not True, and floats written out,
    so that NaN equals itself and 0.0 is not -0.0."""
    return type(value), value if type(value) in _COMMON else repr(value)


def _class_settings(kind: type) -> tuple[Any, ...]:
    """Plain attributes of a class and of its bases, except PyTorch's own."""
    return tuple(
        (name, _plain(value))
        for each in kind.__mro__
        if not each.__module__.startswith(("torch.", "builtins"))
        for name, value in vars(each).items()
        if _is_plain(type(value)) and not name.startswith("__")
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
