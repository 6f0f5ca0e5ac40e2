"""Extend time limits in tests, so that those meant to be long enough are so on a busy machine."""

from __future__ import annotations

from solver.sizes_deadlines_progress import deadline

ENOUGH_S = 1.0
"""Shorter time limits are meant to end a search, so they are not extended."""
TIMES_AS_BUSY, LEAST_S = 10, 60.0
"""By which factor, and to at least how many seconds, limits are extended. They stay finite: no
search may block a test worker for ever."""

_after, _now_s = deadline.Deadline.after, deadline.now_s


def extended(limit_s: float) -> deadline.Deadline:
    """Replaces `Deadline.after`. Limits are not extended if a test has replaced the clock."""
    is_enough = limit_s >= ENOUGH_S and deadline.now_s is _now_s
    return _after(max(TIMES_AS_BUSY * limit_s, LEAST_S) if is_enough else limit_s)
