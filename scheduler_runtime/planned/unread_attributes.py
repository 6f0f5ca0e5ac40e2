"""Numbers, strings and containers in attributes that the training loop changes, and `forward` does
not read: a count of steps, the best loss so far, a list or dict of metrics.

Each trace watches them: containers always, numbers and strings once they have changed, since most
modules have some that never do. A program that is made from a trace that reads none of them is for
all of their values.

`__getattribute__` of the class sees who reads an attribute. Who reads `vars(module)`, or copies the
module, reads them all. Only `object.__getattribute__` goes unnoticed.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any
from unittest import mock

from torch import nn

from graphs.capture import MODULE_ATTRIBUTES, Capture, one_at_a_time
from graphs.trace import CapturedStep
from scheduler_runtime.planned.guards import changed_values

_MISSING: Any = object()
_FILLED_BY_LOOPS = (list, dict, set, deque)


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
        places = self._changing | _containers(model)
        if not places:
            return trace()
        with _reads(model, places) as (there, read):
            before = {place: vars(module)[place[1]] for place, module in there.items()}
            step = trace()
        unread = {
            place
            for place, module in there.items()
            if place not in read and vars(module).get(place[1], _MISSING) is before[place]
        }
        self._unread = [(ref, names) for ref, names in self._unread if ref() is not None]
        self._unread.append((weakref.ref(step.original), frozenset(unread)))
        return step

    def unread_by(self, captured: Capture) -> Set[tuple[str, str]]:
        """The watched attributes that this trace has not read."""
        found = (names for ref, names in self._unread if ref() is captured)
        return next(found, frozenset())


def _containers(model: nn.Module) -> set[tuple[str, str]]:
    """Module path and name of the attributes that a training loop may fill."""
    return {
        (path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _FILLED_BY_LOOPS) and name not in MODULE_ATTRIBUTES
    }


@contextlib.contextmanager
def _reads(
    model: nn.Module, places: Set[tuple[str, str]]
) -> Iterator[tuple[dict[tuple[str, str], nn.Module], Set[tuple[str, str]]]]:
    """Those of these places that exist, with their modules, and those that are read in this
    context."""
    modules = dict(model.named_modules())
    there = {
        (path, name): modules[path]
        for path, name in places
        if path in modules and name in vars(modules[path])
    }
    watched: dict[int, dict[str, tuple[str, str]]] = defaultdict(dict)
    for (path, name), module in there.items():
        watched[id(module)][name] = path, name
    read: set[tuple[str, str]] = set()

    def watching(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(module: Any, name: str) -> Any:
            own = watched.get(id(module), {})
            if name in own:
                read.add(own[name])
            elif name in ("__dict__", "__getstate__") and not _is_of_tracing(sys._getframe(1)):
                read.update(own.values())
            return original(module, name)

        return get

    with contextlib.ExitStack() as stack:
        for kind in {type(module) for module in there.values()}:
            own: Any = kind.__getattribute__
            stack.enter_context(mock.patch.object(kind, "__getattribute__", watching(own)))
        yield there, read


def _is_of_tracing(frame: types.FrameType) -> bool:
    """Whether the code is of tracing itself, which looks for tensors in all attributes."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("graphs", "scheduler_runtime", "torch")
