"""A time limit that is there to be enough, often the default, is enough on a busy machine."""

from __future__ import annotations

from solver.sizes_deadlines_progress import deadline

ENOUGH_S = 1.0
"""Time limits of less than that are there to end a search, and do."""
TIMES_AS_BUSY, LEAST_S = 10, 60.0
"""Of a limit that is to be enough. Not for ever: no search may hang a worker."""

_after, _now_s = deadline.Deadline.after, deadline.now_s


def extended(limit_s: float) -> deadline.Deadline:
    """In place of `Deadline.after`, except where a test has put another clock in place."""
    is_enough = limit_s >= ENOUGH_S and deadline.now_s is _now_s
    return _after(max(TIMES_AS_BUSY * limit_s, LEAST_S) if is_enough else limit_s)
