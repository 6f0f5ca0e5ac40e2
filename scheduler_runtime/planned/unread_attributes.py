"""Numbers, strings and containers in attributes that the training loop changes, and `forward` does
not read: a count of steps, the best loss so far, a list or dict of metrics.

Until one changes, nothing is known of it. Then the step is traced again, and the attributes that
have changed are watched meanwhile. A program that is made from a trace that reads none of them is
for all of their values.

A descriptor on the class sees who reads an attribute. Who reads it from `vars(module)`, or copies
the module, finds a special value there, with which nothing can be done: the trace fails, and is
made again without the watch. Only `is` and `type()` go unnoticed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any
from unittest import mock

from torch import nn

from graphs.capture import Capture, one_at_a_time
from graphs.trace import CapturedStep
from scheduler_runtime.planned.guards import changed_values

_MISSING: Any = object()


class UnreadAttributes:
    """Of one module: module path and name of the attributes that have changed so far, and which of
    them each trace has not read."""

    def __init__(self) -> None:
        self._changing: set[tuple[str, str]] = set()
        self._unread: list[tuple[weakref.ref[Capture], frozenset[tuple[str, str]]]] = []

    def compare(self, planned: Iterable[Any], here: Any, model: nn.Module) -> None:
        """Learn what changes. planned, here: of earlier calls and of this one, by `kind_of`."""
        for each in planned:
            self._changing |= changed_values(each, here, model)

    @one_at_a_time  # the watches are on the classes, which other threads may plan as well
    def trace(self, model: nn.Module, trace: Callable[[], CapturedStep]) -> CapturedStep:
        """What `trace` returns, watched."""
        places = frozenset(self._changing)
        if not places:
            return trace()
        step = None
        # without the watch, the trace may not fail, or fails the same
        with contextlib.suppress(Exception), _watched(model, places) as watches:
            step = trace()
        if step is None or any(each.is_written for each in watches):
            return trace()
        read = frozenset(place for each in watches for place in each.read())
        there = frozenset(place for each in watches for place in each.places.values())
        self._unread = [(ref, names) for ref, names in self._unread if ref() is not None]
        self._unread.append((weakref.ref(step.original), there - read))
        return step

    def unread_by(self, captured: Capture) -> Set[tuple[str, str]]:
        """The watched attributes that this trace has not read."""
        found = (names for ref, names in self._unread if ref() is captured)
        return next(found, frozenset())


class _Watch:
    """In place of an attribute of a class. The values of the watched modules are here; in their
    `vars`, where reading them would not be noticed, they are `_UNUSABLE`.

    places: id of a watched module -> its path, and the attribute.
    is_written: whether one has been set or deleted, which is not for this watch.
    """

    def __init__(self, name: str, default: object) -> None:
        self._name, self._default = name, default
        self.places: dict[int, tuple[str, str]] = {}
        self.values: dict[int, object] = {}
        self.is_written = False
        self._read: set[int] = set()

    def read(self) -> Iterator[tuple[str, str]]:
        return (self.places[each] for each in self._read)

    def __get__(self, module: object, kind: type) -> Any:
        if id(module) in self.values:
            self._read.add(id(module))
            return self.values[id(module)]
        own = {} if module is None else vars(module)
        value = own.get(self._name, self._default)
        if value is _MISSING:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        return value

    def __set__(self, module: object, value: object) -> None:
        self.is_written |= self.values.pop(id(module), _MISSING) is not _MISSING
        vars(module)[self._name] = value

    def __delete__(self, module: object) -> None:
        self.is_written |= self.values.pop(id(module), _MISSING) is not _MISSING
        vars(module).pop(self._name, None)


class _UnusableError(Exception):
    """Something was done with a value that is not there while its attribute is watched."""


class _Unusable:
    """The value, in `vars`, of a watched attribute: all that is done with it raises.

    Its class can be asked for by tracing itself, which looks for tensors in all attributes.
    """

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Read by `isinstance`."""
        asking = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if asking in _OF_TRACING or asking in sys.stdlib_module_names:
            return _Unusable
        raise _UnusableError


def _unusable(*_args: object, **_options: object) -> Any:
    raise _UnusableError


_OF_TRACING = frozenset({"graphs", "scheduler_runtime", "torch"})
_OPERATIONS = (
    *("bool", "int", "float", "complex", "index", "len", "iter", "contains", "getitem", "call"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "repr", "str", "format", "bytes"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "lshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rmatmul"),
    *("rshift", "and", "or", "xor", "rlshift", "rrshift", "rand", "ror", "rxor", "neg", "pos"),
    *("abs", "invert", "round", "trunc", "floor", "ceil", "copy", "deepcopy", "reduce_ex"),
)
for _operation in _OPERATIONS:
    setattr(_Unusable, f"__{_operation}__", _unusable)
_UNUSABLE = _Unusable()


@contextlib.contextmanager
def _watched(model: nn.Module, places: Set[tuple[str, str]]) -> Iterator[list[_Watch]]:
    watches: dict[tuple[type, str], _Watch] = {}
    modules = dict(model.named_modules())
    with contextlib.ExitStack() as stack:
        for path, name in places:
            module = modules.get(path)
            if module is None or name not in vars(module):
                continue
            default = inspect.getattr_static(type(module), name, _MISSING)
            if hasattr(type(default), "__get__"):
                continue
            watch = watches.get((type(module), name))
            if watch is None:
                watch = watches[type(module), name] = _Watch(name, default)
            watch.places[id(module)] = path, name
        for (kind, name), watch in watches.items():
            for module in modules.values():
                if id(module) in watch.places:
                    own = module.__dict__
                    stack.callback(_put_back, own, name, own[name])
                    watch.values[id(module)] = own[name]
                    own[name] = _UNUSABLE  # not removed, which would change the order
            stack.enter_context(mock.patch.object(kind, name, watch, create=True))
        yield list(watches.values())


def _put_back(own: dict[str, Any], name: str, value: object) -> None:
    if own.get(name) is _UNUSABLE:  # otherwise it has been set or deleted
        own[name] = value
