"""How much a step may take while memory is shorter than its budget, and when it may take more.

One limit for all plans of a module. It falls where a step runs out of memory, or where less is free
on the device before a step than its plan takes. After some steps without shortage it rises again.
"""

from __future__ import annotations

N_CALM = 16
"""Steps without shortage before the limit rises; twice as many each time that it fell again."""
SHARE_KEPT = 0.8
"""Of what a plan takes above the resident bytes, the next one may take so much."""
SHARE_OF_RESERVE = 0.5
"""Where less of the reserve than this would be left at the peak, memory is short."""


class Pressure:
    """limit_bytes: for the peak of a plan (None: the whole budget)."""

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self._n_calm = 0
        self._n_wait = N_CALM
        self._has_risen = False
        self._n_seen: int | None = None

    def has_seen_another(self, n_errors: int) -> bool:
        """Whether memory ran short since this was asked last. n_errors: so often so far."""
        before, self._n_seen = self._n_seen, n_errors
        return before is not None and n_errors > before

    def fell(self, limit_bytes: int) -> None:
        """Memory ran short."""
        if self._has_risen and self._n_calm < self._n_wait:  # it rose too early
            self._n_wait *= 2
        self._has_risen = False
        self._n_calm = 0
        self.limit_bytes = limit_bytes

    def step(self) -> bool:
        """A step begins; returns whether the limit may rise."""
        self._n_calm += 1
        if self._n_calm > self._n_wait and self._has_risen:
            self._n_wait = N_CALM  # what it rose to holds
        return self.limit_bytes is not None and self._n_calm > self._n_wait

    def rose(self, limit_bytes: int | None) -> None:
        """There may be room for more."""
        self._has_risen, self._n_calm = True, 0
        self.limit_bytes = limit_bytes
