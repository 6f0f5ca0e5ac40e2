"""Deadlines: when a search has to end.

Searches limit their work by counts (positions, rounds, branch-and-bound nodes, evictions), so that
the same question has the same answer on every machine and under any load. The clock and Ctrl-C only
end a search early, and its answer says so. Every loop whose length depends on the graph checks the
deadline, and every linear program is given the time that is left. Only one simulation of one
schedule, which is linear in its length, cannot be stopped half-way.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Self


def now_s() -> float:
    """Seconds on the monotonic clock."""
    return time.monotonic()


class OutOfTimeError(Exception):
    """The deadline passed in the middle of a computation whose partial result is of no use."""


_interrupts: list[threading.Event] = []
"""The event of the active `ctrl_c_ends_searches`; at most one entry."""
_raising: list[bool] = []
"""One entry for each active `ctrl_c_raises`."""


def interrupted() -> bool:
    """Whether Ctrl-C was pressed inside the active `ctrl_c_ends_searches`."""
    return any(event.is_set() for event in _interrupts)


@contextlib.contextmanager
def ctrl_c_ends_searches() -> Iterator[threading.Event]:
    """Within this context the first Ctrl-C ends the searches; the second raises KeyboardInterrupt.

    The first one makes every deadline pass and sets the yielded event. A nested context yields the
    event of the outer one. Has no effect outside the main thread, or if the program has replaced
    Python's default handler for Ctrl-C.
    """
    if _interrupts:
        yield _interrupts[-1]
        return
    event = threading.Event()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield event
        return

    def end(_signal: int, _frame: object) -> None:
        # the second Ctrl-C has Python's default effect
        signal.signal(signal.SIGINT, signal.default_int_handler)
        event.set()
        if _raising:
            raise KeyboardInterrupt

    _interrupts.append(event)
    signal.signal(signal.SIGINT, end)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _interrupts.remove(event)


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Within `ctrl_c_ends_searches`, around code that checks no deadline: the first Ctrl-C raises
    KeyboardInterrupt too. If it was pressed before, entering the context raises."""
    _raising.append(True)
    try:
        if interrupted():
            raise KeyboardInterrupt
        yield
    finally:
        _raising.pop()


@dataclass(frozen=True)
class Deadline:
    """A point in time; also counts as passed once Ctrl-C was pressed (`ctrl_c_ends_searches`).

    at_s: seconds on the monotonic clock (inf: never).
    """

    at_s: float

    @classmethod
    def after(cls, limit_s: float) -> Self:
        """The deadline `limit_s` seconds from now."""
        return cls(now_s() + limit_s)

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        if interrupted():
            return 0.0
        return self.at_s if math.isinf(self.at_s) else max(0.0, self.at_s - now_s())

    @property
    def passed(self) -> bool:
        return self.left_s <= 0

    def earlier(self, by_s: float) -> Deadline:
        """A deadline `by_s` seconds earlier, to keep that time for later work."""
        return Deadline(self.at_s - by_s)

    def check(self) -> None:
        """Raise OutOfTimeError if the deadline has passed."""
        if self.passed:
            raise OutOfTimeError


NEVER = Deadline(math.inf)


def check_time_limit(time_limit_s: object) -> None:
    """Raise ValueError unless this is a finite number of seconds above zero."""
    is_number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
    if is_number and 0 < float(time_limit_s) < math.inf:  # type: ignore[arg-type]
        return
    raise ValueError(
        f"time_limit_s is {time_limit_s!r}; it is the number of seconds that a search may take: a "
        "finite number above zero, such as 60"
    )
