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
        return self.size / simulation.time_s if simulation and simulation.time_s else None


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
        found = (c for c in reversed(self.candidates) if c.solution.schedule is not None)
        return next(found, None)

    @property
    def beyond(self) -> Candidate | None:
        """The smallest size above `largest` that was tried; None: the search was interrupted."""
        least = 0 if self.largest is None else self.largest.size
        return next((c for c in self.candidates if c.size > least), None)

    @property
    def saturation(self) -> Candidate | None:
        """The smallest candidate whose rate is within SATURATION_SHARE of the best."""
        rates = [(c.rate_per_s or 0.0, c) for c in self.candidates]
        least = (1 - SATURATION_SHARE) * max((rate for rate, _ in rates), default=0.0)
        return next((c for rate, c in rates if rate and rate >= least), None)


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
    candidates: list[Candidate] = []
    refused: list[tuple[int, str]] = []

    def fits(at: int) -> bool:
        try:
            solution = plan(at)
        except SizeNotTraceableError as error:
            refused.append((at, str(error)))
            return False
        for other in candidates:
            if other.solution.graph.graph_id == solution.graph.graph_id:
                raise SameStepError(
                    f"sizes {other.size} and {at} give the same step: the batch does not depend on "
                    "the size"
                )
        candidates.append(Candidate(at, solution))
        if on_candidate is not None:
            on_candidate(candidates[-1])
        if interrupted():  # `plan` handed over what was best by then
            raise KeyboardInterrupt
        return solution.schedule is not None

    ended = False
    try:
        low, high = _galloped(fits, first or FIRST[size])
        while high - low > max(1, low // RESOLUTION[size]):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    except KeyboardInterrupt:
        if all(c.solution.schedule is None for c in candidates):
            raise
        ended = True
    candidates.sort(key=lambda candidate: candidate.size)
    return SizeSearch(size, tuple(candidates), tuple(sorted(refused)), ended)


def _galloped(fits: Callable[[int], bool], first: int) -> tuple[int, int]:
    """A size that fits (0: none does) and the first tried above it that does not."""
    at = first
    if fits(at):
        while at < MOST:
            if not fits(2 * at):
                return at, 2 * at
            at *= 2
        return at, at + 1
    while at > 1:
        if fits(at // 2):
            return at // 2, at
        at //= 2
    return 0, 1
