"""What `forward` reads outside of the model: globals, closures, default arguments, the environment.

It is found by the names in the code, without running it: in the `forward` of each module, and in
the functions, methods and classes that such code names. Code of installed packages and of Python
itself is left out: it reads much, and hardly any of it changes during training.

Of objects and dicts, only the attributes and keys are compared that the code names: a script's
arguments or configuration may also hold what the training loop changes in every step. Objects in
attributes of modules that hold more than plain values are compared by identity (`compared_values`);
here, what the code reads of them (`self.trainer.epoch`) is compared as well.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scheduler_runtime.planned.compared_values import ByIdentity, setting, weakly

_MISSING = object()
_ROOT = Path(__file__).parents[2]
_PACKAGES = ("graphs", "solver", "scheduler_runtime", "checkpoint_solver")
_NOT_OF_USER = (
    sysconfig.get_paths()["stdlib"],
    "<frozen",
    *(f"{_ROOT / package}{os.sep}" for package in _PACKAGES),
)


class _Now:
    """Stands for the present values outside of the model."""


NOW = _Now()


@dataclass(frozen=True)
class _Place:
    """A value outside of the model.

    title: its name, for messages.
    read: returns it in a form to be compared.
    """

    title: str
    read: Callable[[], Any]


class ReadElsewhere:
    """The values outside of the model that its code names, as they are now; later equal to `NOW`
    for as long as they are the same."""

    def __init__(self, functions: Iterable[Any], modules: Iterable[nn.Module]) -> None:
        self._places = _Search(functions, modules).places
        self._values = [place.read() for place in self._places]

    def changed(self) -> str | None:
        """The first place whose value has changed; None: there is none."""
        for place, value in zip(self._places, self._values, strict=True):
            if place.read() != value:
                return place.title
        return None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ReadElsewhere):
            titles = [[place.title for place in each._places] for each in (self, other)]
            return titles[0] == titles[1] and self._values == other._values
        return other is NOW and self.changed() is None

    __hash__ = None  # type: ignore[assignment]


class _Search:
    """Finds the places. functions: where it begins, besides the `forward` of each module."""

    def __init__(self, functions: Iterable[Any], modules: Iterable[nn.Module]) -> None:
        self.places: list[_Place] = []
        self._waiting: list[types.FunctionType] = []
        self._seen: set[int] = set()
        self._named: set[str] = set()
        self._pairs: set[tuple[str, str]] = set()
        modules = list(modules)
        self._methods: dict[str, list[Any]] = {}
        for kind in dict.fromkeys(each for m in modules for each in type(m).__mro__):
            if not kind.__module__.startswith(("torch.", "builtins")):
                self._offer(vars(kind))
        for each in (*functions, *self._methods.pop("forward", ())):
            self._add(each)
        for module in modules:
            for value in vars(module).values():
                self._add(value)
        while self._waiting:
            self._read(self._waiting.pop())
        for module in modules:
            self._read_objects(module)

    def _offer(self, attributes: Any) -> None:
        """Functions that are searched when code names them."""
        for name, value in attributes.items():
            self._methods.setdefault(name, []).append(value)

    def _add(self, value: Any) -> None:
        """Search the functions that this value is, or consists of."""
        for function in _functions_in(value):
            if id(function) not in self._seen and _is_of_user(function.__code__):
                self._seen.add(id(function))
                self._waiting.append(function)
        if isinstance(value, type) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._offer(vars(value))
            for name in ("__init__", "__call__", *self._named):
                self._add(vars(value).get(name))

    def _read(self, function: types.FunctionType) -> None:
        code = _names_in(function.__code__)
        for name in code.names - self._named:
            self._named.add(name)
            for method in self._methods.get(name, ()):
                self._add(method)
        self._pairs |= code.pairs
        at = weakref.ref(function)
        for name in code.globals_read:
            variables = function.__globals__
            self._note(f"the global {name!r}", functools.partial(_global, at, name), code)
            found = variables.get(name)
            if isinstance(found, types.ModuleType):
                self._read_module(found, code)
        for index, name in enumerate(function.__code__.co_freevars):
            if name not in code.written:
                title = f"{name!r}, in the closure of {function.__qualname__}"
                self._note(title, functools.partial(_cell, at, index), code)
        if function.__defaults__ or function.__kwdefaults__:
            title = f"a default argument of {function.__qualname__}"
            self.places.append(_Place(title, lambda: _defaults(at)))
        if code.names & {"environ", "getenv"}:
            for key in filter(str.isidentifier, code.strings):
                title = f"the environment variable {key}"
                self.places.append(_Place(title, functools.partial(os.environ.get, key)))

    def _read_module(self, module: types.ModuleType, code: _Names) -> None:
        """The attributes of a Python module that the code names."""
        for name in code.names & vars(module).keys():
            title = f"{module.__name__}.{name}"
            self._note(title, functools.partial(vars(module).get, name, _MISSING), code)

    def _read_objects(self, module: nn.Module) -> None:
        """Attributes of objects in attributes of a module, where code reads one after the other.

        An object that holds more than plain values is compared by identity otherwise."""
        for holder, name in self._pairs:
            value = vars(module).get(holder)
            attributes = getattr(value, "__dict__", {})
            if name in attributes and not isinstance(value, nn.Module | type | torch.Tensor):
                title = f"attribute {name!r} of the {type(value).__name__} in {holder!r}"
                get = functools.partial(_attribute, weakly(value), name)
                self.places.append(_Place(title, get))

    def _note(self, title: str, get: Callable[[], Any], code: _Names) -> None:
        value = get()
        if value is not _MISSING and not isinstance(value, types.ModuleType):
            self.places.append(_Place(title, lambda: _compared(get(), code)))
            self._add(value)


def _global(function: weakref.ref[types.FunctionType], name: str) -> Any:
    found = function()
    return _MISSING if found is None else found.__globals__.get(name, _MISSING)


def _cell(function: weakref.ref[types.FunctionType], index: int) -> Any:
    found = function()
    try:
        return _MISSING if found is None else (found.__closure__ or ())[index].cell_contents
    except (ValueError, IndexError):  # an empty cell; a function with other code
        return _MISSING


def _attribute(get_holder: Callable[[], Any], name: str) -> Any:
    holder = get_holder()
    return _MISSING if holder is None else setting(vars(holder).get(name, _MISSING), set())


def _defaults(function: weakref.ref[types.FunctionType]) -> Any:
    found = function()
    return found and setting((found.__defaults__, found.__kwdefaults__), set())


def _compared(value: Any, code: _Names) -> Any:
    """A value for comparison; of an object or a dict, what the code names."""
    if isinstance(value, torch.Tensor):
        return ByIdentity(value)
    if isinstance(value, dict):
        keys = code.strings & value.keys()
        return setting({key: value[key] for key in keys} if keys else value, set())
    is_code = isinstance(value, nn.Module | types.FunctionType | functools.partial)
    attributes = getattr(value, "__dict__", None)
    if is_code or attributes is None:
        return setting(value, set())
    named = {name: attributes[name] for name in code.names & attributes.keys()}
    return ByIdentity(value), setting(named, set())


@dataclass(frozen=True)
class _Names:
    """What is named in some code and in the code inside of it.

    names: attributes and globals.
    globals_read: globals that it reads and does not set.
    written: variables of closures that it sets.
    strings: constants.
    pairs: attributes of which the second is read from the first.
    """

    names: frozenset[str]
    globals_read: frozenset[str]
    written: frozenset[str]
    strings: frozenset[str]
    pairs: frozenset[tuple[str, str]]


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> _Names:
    codes = list(_codes_in(code))
    instructions = [each for one in codes for each in dis.get_instructions(one)]

    def of(*operations: str) -> frozenset[str]:
        return frozenset(str(each.argval) for each in instructions if each.opname in operations)

    return _Names(
        frozenset(name for one in codes for name in one.co_names),
        of("LOAD_GLOBAL", "LOAD_NAME") - of("STORE_GLOBAL"),
        of("STORE_DEREF"),
        frozenset(each for one in codes for each in one.co_consts if isinstance(each, str)),
        frozenset(
            (str(one.argval), str(other.argval))
            for one, other in itertools.pairwise(instructions)
            if one.opname == "LOAD_ATTR" and other.opname in ("LOAD_ATTR", "LOAD_METHOD")
        ),
    )


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, functools.partial):
        yield from _functions_in(value.func)
    elif isinstance(value, property | functools.cached_property):
        yield from _functions_in(getattr(value, "fget", None) or getattr(value, "func", None))
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield from _functions_in(value.__func__)


def _is_of_user(code: types.CodeType) -> bool:
    """Whether the code is neither Python's own nor that of an installed package."""
    path = code.co_filename
    installed = "site-packages" in path or "dist-packages" in path
    return not installed and not path.startswith(_NOT_OF_USER)
