"""When a search has to end.

Searches limit their work by counts (positions, rounds, branch-and-bound nodes, evictions), so that
the same question has the same answer on every machine and under any load. The clock and Ctrl-C only
end a search early, and its answer says so. Every loop whose length depends on the graph asks the
deadline, and every linear program gets the time that is left. What cannot be stopped half-way is
one simulation of one schedule, linear in its length.
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
    """The deadline has passed in the middle of something of which a part is of no use."""


_interrupts: list[threading.Event] = []
"""Of the active `ctrl_c_ends_searches`: at most one."""
_raising: list[bool] = []
"""Of the active `ctrl_c_raises`."""


def interrupted() -> bool:
    """Whether Ctrl-C was pressed in the active `ctrl_c_ends_searches`."""
    return any(event.is_set() for event in _interrupts)


@contextlib.contextmanager
def ctrl_c_ends_searches() -> Iterator[threading.Event]:
    """The first Ctrl-C makes every deadline pass and sets the event; the second raises
    KeyboardInterrupt.

    Without effect outside the main thread, and where Ctrl-C does something else than to raise
    KeyboardInterrupt.
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
    """For what asks no deadline within `ctrl_c_ends_searches`: Ctrl-C raises KeyboardInterrupt as
    well, or has done so before."""
    _raising.append(True)
    try:
        if interrupted():
            raise KeyboardInterrupt
        yield
    finally:
        _raising.pop()


@dataclass(frozen=True)
class Deadline:
    """at_s: on the monotonic clock."""

    at_s: float

    @classmethod
    def after(cls, limit_s: float) -> Self:
        """So many seconds from now."""
        return cls(now_s() + limit_s)

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        if interrupted():
            return 0.0
        return self.at_s if math.isinf(self.at_s) else max(0.0, self.at_s - now_s())

    @property
    def passed(self) -> bool:
        return self.left_s <= 0

    def earlier(self, by_s: float) -> Deadline:
        """The same with some time kept for what comes after."""
        return Deadline(self.at_s - by_s)

    def check(self) -> None:
        """Raises OutOfTimeError once it has passed."""
        if self.passed:
            raise OutOfTimeError


NEVER = Deadline(math.inf)


def check_time_limit(time_limit_s: object) -> None:
    """Raises ValueError for what is no positive number of seconds."""
    is_number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
    if is_number and 0 < float(time_limit_s) < math.inf:  # type: ignore[arg-type]
        return
    raise ValueError(
        f"time_limit_s is {time_limit_s!r}; it is the number of seconds that a search may take: a "
        "finite number above zero, such as 60"
    )
