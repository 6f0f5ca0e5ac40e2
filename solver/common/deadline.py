"""The moment at which a search has to end.

Work is limited by counts (moments, rounds, branch-and-bound nodes, evictions), so that the same
question has the same answer on every machine; the clock is the last resort. Every loop whose length
depends on the graph asks the deadline, and every linear program gets the time that is left. What
cannot be stopped half-way is one judgement of one schedule, linear in its length.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Real
from typing import Self


def now_s() -> float:
    """Seconds on the monotonic clock."""
    return time.monotonic()


class OutOfTimeError(Exception):
    """The deadline has passed in the middle of something of which a part is of no use."""


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
        """Seconds until then; negative afterwards."""
        return self.at_s if math.isinf(self.at_s) else self.at_s - now_s()

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
KEPT_SHARE = 0.1
"""Of the time limit: kept for saying why, while nothing has been found yet."""


def check_time_limit(time_limit_s: object) -> None:
    """Raises ValueError for what is no positive number of seconds."""
    is_number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
    if is_number and 0 < float(time_limit_s) < math.inf:  # type: ignore[arg-type]
        return
    raise ValueError(
        f"time_limit_s is {time_limit_s!r}; it is how many seconds a search may take: a finite "
        "number above zero, such as 60"
    )
