"""Numbers, strings, tensors and containers in attributes that the training loop changes, and that
`forward` does not read: a count of steps, the best loss so far, a list or dict of metrics.

Each trace watches them: containers always (after `gc.freeze`, once they have changed), numbers,
strings and tensors once they have changed (tensors: their form), since most modules have some that
never do. A program serves all values of those that its trace did not read.

`__getattribute__` of the class sees who reads an attribute. Reading `vars(module)` or copying the
module counts as reading all of them. So does a container that something else refers to: a closure,
another object, a bound method. Reads by `object.__getattribute__` or `super()` go unnoticed.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
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
        places = set(self._changing)
        containers = _containers(model)
        # Frozen objects that refer to a container are not found. (They are counted one by one.)
        if containers and not gc.get_freeze_count():
            places |= containers
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
    context, or may be read without being noticed."""
    modules = dict(model.named_modules())
    there = {
        (path, name): modules[path]
        for path, name in places
        if path in modules and name in vars(modules[path])
    }
    watched: dict[int, dict[str, tuple[str, str]]] = defaultdict(dict)
    for (path, name), module in there.items():
        watched[id(module)][name] = path, name
    read = _held_elsewhere(there)

    def watching(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(module: Any, name: str) -> Any:
            own = watched.get(id(module), {})
            if name in own:
                read.add(own[name])
            elif name in ("__dict__", "__getstate__") and not _is_of_tracing(sys._getframe(1)):
                read.update(own.values())
            return original(module, name)

        return get

    kinds = {type(module) for module in there.values()}
    plain: Any = object.__getattribute__
    unwatched = {kind for kind in kinds if kind.__getattribute__ is not plain}
    with contextlib.ExitStack() as stack:
        for kind in kinds - unwatched:
            original: Any = kind.__getattribute__
            try:
                stack.enter_context(mock.patch.object(kind, "__getattribute__", watching(original)))
            except (AttributeError, TypeError):  # its metaclass does not allow it
                unwatched.add(kind)
        read.update(place for place, module in there.items() if type(module) in unwatched)
        yield there, read


def _held_elsewhere(there: Mapping[tuple[str, str], nn.Module]) -> set[tuple[str, str]]:
    """The containers to which something else refers, so that forward may read them there.

    there: places of attributes, with their modules.
    """
    containers = {
        (path, name): vars(module)[name]
        for (path, name), module in there.items()
        if isinstance(vars(module)[name], _FILLED_BY_LOOPS)
    }
    holders = (containers, *there.values(), *map(vars, there.values()))
    known = {id(each) for each in holders}
    others = [each for each in gc.get_referrers(*containers.values()) if id(each) not in known]
    elsewhere = {id(value) for each in others for value in gc.get_referents(each)}
    return {place for place, value in containers.items() if id(value) in elsewhere}


def _is_of_tracing(frame: types.FrameType) -> bool:
    """Whether the code is of tracing itself, which looks for tensors in all attributes."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("graphs", "scheduler_runtime", "torch")
