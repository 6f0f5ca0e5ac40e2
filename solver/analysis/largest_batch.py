"""Search for the largest batch or sequence whose plan fits the budget.

Each candidate is traced and planned; nothing is run. The search doubles the size while a plan fits,
or halves it while none does, then bisects. It assumes that a plan that fits at one size exists at
every smaller size, which holds for steps that grow with the batch. A candidate for which nothing
was found within the time limit counts as one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from solver.common import interrupted
from solver.schedule import Solution

Size = Literal["batch_size", "seq_length"]

FIRST: Mapping[Size, int] = {"batch_size": 1, "seq_length": 128}
"""The first size to try by default."""
RESOLUTION: Mapping[Size, int] = {"batch_size": 2**60, "seq_length": 64}
"""The answer is exact below this size and precise to 1/RESOLUTION of itself above."""
MOST = 2**20
"""The largest size to try."""
SATURATION_SHARE = 0.01
"""Throughput saturates at the smallest candidate within this share of the best rate."""


class SameStepError(ValueError):
    """Two sizes give the same step: the batch does not depend on the size."""


class SizeNotTraceableError(ValueError):
    """No step of this size can be traced, which counts as one that does not fit."""


@dataclass(frozen=True)
class Candidate:
    """One size and its solution."""

    size: int
    solution: Solution

    @property
    def rate_per_s(self) -> float | None:
        """Samples, or positions of each sequence, per second; None without a plan."""
        simulation = self.solution.simulation
        return (
            None if simulation is None or simulation.time_s == 0 else self.size / simulation.time_s
        )


@dataclass(frozen=True)
class SizeSearch:
    """candidates: smallest size first. refused: sizes that could not be traced, and why.
    interrupted: Ctrl-C ended the search.
    """

    size: Size
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[int, str], ...] = ()
    interrupted: bool = False

    @property
    def largest(self) -> Candidate | None:
        """The largest with a plan; None: no size that was tried has one."""
        found = [c for c in self.candidates if c.solution.schedule is not None]
        return max(found, key=lambda c: c.size, default=None)

    @property
    def beyond(self) -> Candidate | None:
        """The smallest size above `largest` that was tried; None: the search was interrupted."""
        least = 0 if self.largest is None else self.largest.size
        return min((c for c in self.candidates if c.size > least), key=_size, default=None)

    @property
    def saturation(self) -> Candidate | None:
        """The smallest candidate whose rate is within SATURATION_SHARE of the best."""
        rates = [(c, c.rate_per_s) for c in self.candidates if c.rate_per_s is not None]
        best = max((rate for _, rate in rates if rate is not None), default=None)
        if best is None:
            return None
        return next(
            c for c, rate in rates if rate is not None and rate >= (1 - SATURATION_SHARE) * best
        )


def largest(
    plan: Callable[[int], Solution],
    *,
    size: Size = "batch_size",
    first: int | None = None,
    on_candidate: Callable[[Candidate], None] | None = None,
) -> SizeSearch:
    """Search for the largest size whose plan fits.

    plan: solves one size; may raise SizeNotTraceableError for any size but the first.
    first: the first size to try (None: FIRST).

    Calls `plan` about 2 log2(answer) times.

    Raises SameStepError, KeyboardInterrupt (Ctrl-C before any plan fits); whatever `plan` raises.
    """
    search = _Search(plan, on_candidate)
    try:
        fits, overflows = _galloped(search, first or FIRST[size])
        while overflows - fits > max(1, fits // RESOLUTION[size]):
            middle = (fits + overflows) // 2
            if search.fits(middle):
                fits = middle
            else:
                overflows = middle
    except KeyboardInterrupt:
        if not any(c.solution.schedule is not None for c in search.candidates):
            raise
        return search.result(size, interrupted=True)
    return search.result(size)


def _galloped(search: _Search, first: int) -> tuple[int, int]:
    """A size that fits (0: none does) and the first tried above it that does not."""
    at = first
    if search.fits(at):
        while at < MOST:
            if not search.fits(2 * at):
                return at, 2 * at
            at *= 2
        return at, at + 1
    while at > 1:
        if search.fits(at // 2):
            return at // 2, at
        at //= 2
    return 0, 1


class _Search:
    """The candidates planned so far."""

    def __init__(
        self, plan: Callable[[int], Solution], on_candidate: Callable[[Candidate], None] | None
    ) -> None:
        self.candidates: list[Candidate] = []
        self.refused: list[tuple[int, str]] = []
        self._plan = plan
        self._on_candidate = on_candidate

    def fits(self, size: int) -> bool:
        try:
            solution = self._plan(size)
        except SizeNotTraceableError as error:
            self.refused.append((size, str(error)))
            return False
        self._keep(size, solution)
        if interrupted():  # `plan` handed over what was best by then
            raise KeyboardInterrupt
        return solution.schedule is not None

    def _keep(self, size: int, solution: Solution) -> None:
        for other in self.candidates:
            if other.solution.graph.graph_id == solution.graph.graph_id:
                raise SameStepError(
                    f"sizes {other.size} and {size} give the same step: the batch does not depend "
                    "on the size"
                )
        candidate = Candidate(size, solution)
        self.candidates.append(candidate)
        if self._on_candidate is not None:
            self._on_candidate(candidate)

    def result(self, size: Size, *, interrupted: bool = False) -> SizeSearch:
        candidates = tuple(sorted(self.candidates, key=_size))
        return SizeSearch(size, candidates, tuple(sorted(self.refused)), interrupted)


def _size(candidate: Candidate) -> int:
    return candidate.size
