"""Numbers and strings in attributes that the training loop changes, and `forward` does not read: a
count of steps, the best loss so far.

Until one changes, nothing is known of it. Then the step is traced again, and the attributes that
have changed are watched meanwhile. A program that is made from a trace that reads none of them is
for all of their values.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, TypeVar
from unittest import mock

from torch import nn

from graphs.capture import Capture
from graphs.trace import CapturedStep
from scheduler_runtime.planned.guards import changed_values

Traced = TypeVar("Traced")
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

    def trace(self, model: nn.Module, trace: Callable[[], CapturedStep]) -> CapturedStep:
        """What `trace` returns, watched."""
        places = frozenset(self._changing)
        if not places:
            return trace()
        try:
            with _watched(model, places) as watches:
                step = trace()
        except Exception:  # noqa: BLE001 - without the watch it may not fail, or fails the same
            return trace()
        if any(each.is_written for each in watches):
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
    """In place of an attribute of a class. The values of the watched modules are here and not in
    their `vars`, where reading them would not be noticed.

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
                    stack.callback(_put_back, own, dict(own), name)
                    watch.values[id(module)] = own.pop(name)
            stack.enter_context(mock.patch.object(kind, name, watch, create=True))
        yield list(watches.values())


def _put_back(own: dict[str, Any], before: dict[str, Any], name: str) -> None:
    """The attribute, at its place: calls are compared by the order of attributes too."""
    now = {name: before[name], **own}
    own.clear()
    own.update({each: now[each] for each in before if each in now})
    own.update(now)
