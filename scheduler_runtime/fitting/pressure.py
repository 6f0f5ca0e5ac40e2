"""Limit how much memory a step may take while less is available than its budget.

There is one limit for all plans of a module. It falls if a step runs out of memory, or if less is
free on the device before a step than its plan takes. After some steps without a shortage, it rises.
"""

from __future__ import annotations

N_CALM = 16
"""Steps without a shortage before the limit rises; doubled each time that it falls soon after."""
SHARE_KEPT = 0.8
"""The share of a plan's bytes above the resident ones that the next tighter plan may take."""
SHARE_OF_RESERVE = 0.5
"""Memory is short if less than this share of the reserve would be left at the peak."""


class Pressure:
    """The limit on the peak of a module's plans.

    limit_bytes: the present limit (None: the whole budget).
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self._n_calm = 0
        self._n_wait = N_CALM
        self._has_risen = False
        self._n_seen: int | None = None

    def has_new_errors(self, n_errors: int) -> bool:
        """Whether memory has run out since the last call. n_errors: how often it has so far."""
        before, self._n_seen = self._n_seen, n_errors
        return before is not None and n_errors > before

    def lower_limit(self, limit_bytes: int) -> None:
        """Lower the limit after a shortage."""
        if self._has_risen and self._n_calm < self._n_wait:  # it rose too early
            self._n_wait *= 2
        self._has_risen = False
        self._n_calm = 0
        self.limit_bytes = limit_bytes

    def begin_step(self) -> bool:
        """Note that a step begins; returns whether the limit may rise."""
        self._n_calm += 1
        if self._n_calm > self._n_wait and self._has_risen:
            self._n_wait = N_CALM  # the raised limit has held
        return self.limit_bytes is not None and self._n_calm > self._n_wait

    def raise_limit(self, limit_bytes: int | None) -> None:
        """Raise the limit, since there may be room for more."""
        self._has_risen, self._n_calm = True, 0
        self.limit_bytes = limit_bytes
