"""Random generators other than torch's default ones that a forward pass may use, and their states.

A trace sees each operator that draws from torch's default generators. Numbers drawn from any other
generator would become constants of the traced step, so these generators are looked up and watched:
the global ones of Python and NumPy, and those that a forward pass can reach. The search covers
attributes of modules and of their classes, containers and plain objects in these attributes, and
the globals and closures named by `forward`, by the functions and methods that it names, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphs.capture.threads import in_this_thread
from graphs.model_calls import TraceError

_PYTHON_GENERATOR: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of the module `random`."""

_HOLDS_NOTHING = {NoneType, bool, int, float, str, type, nn.Parameter, torch.Tensor, ModuleType}
"""Classes of most values of a module's attributes, passed over without a search."""


def own_generator_error(operator: object) -> TraceError:
    """The error for an operator call with a `generator=` argument."""
    return TraceError(
        f"{operator} draws from a generator of its own, which recomputation cannot replay; leave "
        "generator= out: the default generator is replayed"
    )


def refuse_own_generator(operator: object, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TraceError if the operator is called with a generator of its own."""
    if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
        raise own_generator_error(operator)


def generators_of(model: nn.Module) -> dict[str, Any]:
    """Find the generators that the model may use, except torch's default ones.

    Returns them by their names for messages, such as "the random.Random in 'mask.rng'", with a
    number behind it for all but one of those in the same place.
    """
    found: dict[int, tuple[str, Any]] = {}
    found[id(_PYTHON_GENERATOR)] = ("Python's random", _PYTHON_GENERATOR)
    defaults = {id(each) for each in (torch.default_generator, *torch.cuda.default_generators)}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_generator = numpy_random.mtrand._rand
        found[id(numpy_generator)] = ("numpy.random", numpy_generator)
    kinds = _generator_classes()
    visited: set[FunctionType] = set()
    for path, module in model.named_modules():
        for name, value in _named_values_of(module, visited):
            if type(value) in _HOLDS_NOTHING:
                continue
            for each in _generators_inside(value, kinds):
                if id(each) not in defaults:
                    kind = f"{type(each).__module__.partition('.')[0]}.{type(each).__name__}"
                    where = f"{path}.{name}" if path else name
                    found.setdefault(id(each), (f"the {kind} in {where!r}", each))
    named: dict[str, Any] = {}
    for name, each in found.values():
        n_before = sum(other.partition(" (number ")[0] == name for other in named)
        named[f"{name} (number {n_before + 1})" if n_before else name] = each
    return named


@contextlib.contextmanager
def no_generators_made(model: nn.Module) -> Iterator[None]:
    """A context for a forward pass: raise TraceError if it makes a generator and keeps it.

    Nothing would know the state from which the first call has drawn. The attributes that hold such
    generators are as before then, so planning has not advanced them.
    """
    before = generators_of(model).keys()
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    yield
    made = {n: each for n, each in generators_of(model).items() if n not in before}
    if not made:
        return
    ids, kinds = {*map(id, made.values())}, _generator_classes()
    for now, former in attributes:
        for name in [*now]:
            if not ids.isdisjoint(map(id, _generators_inside(now[name], kinds))):
                if name in former:
                    now[name] = former[name]
                else:
                    del now[name]
    raise made_generator_error(next(iter(made)))


def made_generator_error(name: str) -> TraceError:
    """The error for a generator, by its name for messages, that the first call of forward makes."""
    return TraceError(
        f"forward makes {name} and keeps it, so a recomputation would draw other numbers than the "
        "call that made it; make it in __init__, or call the model once before planning"
    )


def _generator_classes() -> set[type]:
    """The classes of generators whose state can be restored. SystemRandom has none."""
    kinds: set[type] = {random.Random, torch.Generator}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        kinds |= {numpy_random.Generator, numpy_random.BitGenerator, numpy_random.RandomState}
    return kinds


def state_of(generator: Any) -> Any:
    """The generator's state, as a value that can be compared with `==`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        with _disable_current_modes():  # else it is a fake tensor while a step is traced
            return generator.get_state().numpy().tobytes()
    has_get_state = hasattr(generator, "get_state")
    return pickle.dumps(
        generator.get_state() if has_get_state else _bit_generator_of(generator).state
    )


def restore_state(generator: Any, state: Any) -> None:
    """Restore a generator's state, as returned by `state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        with _disable_current_modes():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif hasattr(generator, "set_state"):
        generator.set_state(pickle.loads(state))
    else:
        _bit_generator_of(generator).state = pickle.loads(state)


@contextlib.contextmanager
def states_restored(generators: Iterable[Any]) -> Iterator[None]:
    """A context after which these generators have their present states again."""
    before = [(each, state_of(each)) for each in generators]
    try:
        yield
    finally:
        for each, state in before:
            restore_state(each, state)


@contextlib.contextmanager
def system_numbers_noted(note: Callable[[], object]) -> Iterator[None]:
    """While inside, call `note` when this thread takes random numbers from the operating system.

    That seeds generators which are made without a seed (`np.random.default_rng()`), and gives the
    numbers of `random.SystemRandom` and `secrets`. Not noted: `random.Random()`, `os.urandom`.
    """
    read = random._urandom  # type: ignore[attr-defined]

    def noted(n_bytes: int) -> bytes:
        note()
        return bytes(read(n_bytes))

    with mock.patch.object(random, "_urandom", in_this_thread(noted, read)):
        yield


def _bit_generator_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def _named_values_of(module: nn.Module, visited: set[FunctionType]) -> Iterator[tuple[str, Any]]:
    """The names and values that the module's forward may refer to; library classes are skipped."""
    objects = [value for value in vars(module).values() if not isinstance(value, nn.Module)]
    kinds = [*type(module).__mro__, *map(type, objects)]
    kinds = [kind for kind in kinds if not _is_of_library(kind)]
    yield from vars(module).items()
    for kind in kinds:
        yield from vars(kind).items()
    forwards = [vars(kind).get("forward") for kind in kinds]
    yield from _named_values_reached([*forwards, *objects], kinds, visited)


def _named_values_reached(
    values: Iterable[Any], kinds: Iterable[type], visited: set[FunctionType]
) -> Iterator[tuple[str, Any]]:
    """The names and values that functions refer to, directly or through other functions.

    values: where to start; those that are not functions are ignored.
    kinds: classes in which the names of attributes and methods are looked up.
    visited: functions already visited; the ones visited here are added.
    """
    stack = [function for value in values for function in _functions_in(value)]
    while stack:
        function = stack.pop()
        if function in visited or _is_of_library(function):
            continue
        visited.add(function)
        names = _names_in(function.__code__)
        found = [(name, function.__globals__[name]) for name in names & {*function.__globals__}]
        for module in [value for _, value in found if isinstance(value, ModuleType)]:
            if not _is_library(module.__name__):
                found += [(name, vars(module)[name]) for name in names & {*vars(module)}]
        for kind in kinds:
            found += [(name, vars(kind)[name]) for name in names & {*vars(kind)}]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # the cell is still empty
                found.append((name, cell.cell_contents))
        yield from found
        stack += [each for _, value in found for each in _functions_in(value)]


def _functions_in(value: Any) -> list[FunctionType]:
    """The Python function that runs if the value is called, or read if it is a property."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    elif isinstance(value, functools.partial):
        value = value.func
    return [value] if isinstance(value, FunctionType) else []


def _names_in(code: CodeType) -> set[str]:
    """Names of globals, attributes and methods in the code, nested functions included."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_of_library(value: type | FunctionType) -> bool:
    return _is_library(value.__module__ or "")


@functools.cache
def _is_library(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("torch", "numpy") or package in sys.stdlib_module_names


def _generators_inside(value: Any, kinds: set[type]) -> Iterator[Any]:
    """The generators of these classes among the value, the items of its containers, and the
    attributes of a plain object."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        each = stack.pop()
        kind = type(each)
        if kind in _HOLDS_NOTHING or id(each) in seen:
            continue
        seen.add(id(each))
        if not kinds.isdisjoint(kind.__mro__):
            if not isinstance(each, random.SystemRandom):
                yield each
        elif isinstance(each, dict):
            stack += each.values()
        elif isinstance(each, list | tuple):
            stack += iter(each)  # a subclass may refuse `len`, as e3nn's Irreps does
        elif each is value and not isinstance(each, nn.Module | type | ModuleType):
            stack += (getattr(each, "__dict__", None) or {}).values()
