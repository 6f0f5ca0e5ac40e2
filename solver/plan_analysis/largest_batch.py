"""Search for the largest batch or sequence whose plan fits the budget.

Each candidate size is traced and planned; nothing is run. The search multiplies the size by GROWTH
while a plan fits, or halves it while none does, and then bisects. Once two sizes are known, it
first tries the size that is the answer if the bytes needed grow linearly, and sizes near it. It
assumes that if a plan fits at one size, one fits at every smaller size, which holds for steps that
grow with the batch. A candidate for which no plan was found counts as one that does not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from solver.bound import StorageGraph
from solver.schedule import Solution
from solver.sizes_deadlines_progress import interrupted

Size = Literal["batch_size", "seq_length"]

FIRST_SIZE: Mapping[Size, int] = {"batch_size": 1, "seq_length": 128}
"""The first size to try by default."""
RETRY_SIZE: Mapping[Size, int] = {"batch_size": 2}
"""The first size to try if the model cannot be traced with the default one."""
RESOLUTION: Mapping[Size, int] = {"batch_size": 2**60, "seq_length": 64}
"""Below this size the answer is exact, above it is within 1/RESOLUTION of its size."""
GROWTH = 4
"""Factor from one size to the next until one does not fit: large, because tracing is slow."""
MAX_SIZE = 2**20
"""The largest size that is tried."""
SATURATION_SHARE = 0.01
"""Throughput saturates at the smallest candidate within this share of the best rate."""


class SameStepError(ValueError):
    """Two sizes give the same step, so the batch does not depend on the size."""


class SizeNotTraceableError(ValueError):
    """A step of this size cannot be traced; the size counts as one that does not fit."""


@dataclass(frozen=True)
class Candidate:
    """A size that was tried, and its solution."""

    size: int
    solution: Solution

    @property
    def rate_per_s(self) -> float | None:
        """Size per second: samples, or positions of each sequence; None without a plan."""
        simulation = self.solution.simulation
        return self.size / simulation.time_s if simulation and simulation.time_s else None


@dataclass(frozen=True)
class SizeSearch:
    """The result of a search.

    size: which size was searched for.
    candidates: the sizes that were planned, smallest first.
    refused: (size, reason) for sizes that could not be traced, smallest first.
    interrupted: Ctrl-C ended the search.
    """

    size: Size
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[int, str], ...] = ()
    interrupted: bool = False

    @property
    def largest(self) -> Candidate | None:
        """The largest candidate with a plan (None: no size that was tried has one)."""
        found = (c for c in reversed(self.candidates) if c.solution.schedule is not None)
        return next(found, None)

    def with_solution(self, size: int, solution: Solution) -> SizeSearch:
        """This result with another solution for one of its sizes."""
        others = (Candidate(size, solution) if c.size == size else c for c in self.candidates)
        return dataclasses.replace(self, candidates=tuple(others))

    @property
    def beyond(self) -> Candidate | None:
        """The smallest candidate above `largest` (None: no larger size was planned)."""
        least = 0 if self.largest is None else self.largest.size
        return next((c for c in self.candidates if c.size > least), None)

    @property
    def saturation(self) -> Candidate | None:
        """The smallest candidate whose rate is within SATURATION_SHARE of the best rate."""
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

    plan: plans the step of one size; may raise SizeNotTraceableError, but not for the first size.
    size: which size is searched for; sets the defaults for `first` and the resolution.
    first: the first size to try (None: FIRST_SIZE).
    on_candidate: called with each candidate once it is planned.

    Calls `plan` about log4(answer) + 2 times if the bytes needed grow linearly, else about
    2 log2(answer) times.

    Raises SameStepError, KeyboardInterrupt if Ctrl-C is pressed before any plan fits, and whatever
    else `plan` raises.
    """
    candidates: list[Candidate] = []
    refused: list[tuple[int, str]] = []

    def fits(at: int) -> bool:
        """Plan this size, and note it as a candidate or as refused."""
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
        # Without the interruption a plan might have been found, so this is no candidate.
        if interrupted() and solution.schedule is None:
            raise KeyboardInterrupt
        candidates.append(Candidate(at, solution))
        if on_candidate is not None:
            on_candidate(candidates[-1])
        if interrupted():  # the plan is the best one found until then
            raise KeyboardInterrupt
        return solution.schedule is not None

    ended = False
    try:
        at, low, high = first or FIRST_SIZE[size], 0, MAX_SIZE + 1  # low fits, high does not
        while high - low > (step := max(1, low // RESOLUTION[size])):
            low, high = (at, high) if fits(at) else (low, at)
            at = _next_size(low, high, step, _expected_largest(candidates), candidates)
    except KeyboardInterrupt:
        if all(c.solution.schedule is None for c in candidates):
            raise
        ended = True
    candidates.sort(key=lambda candidate: candidate.size)
    return SizeSearch(size, tuple(candidates), tuple(sorted(refused)), ended)


def _next_size(
    low: int, high: int, step: int, expected: int | None, candidates: Sequence[Candidate]
) -> int:
    """The next size to try, between `low`, which fits, and `high`, which does not.

    If a size does not fit although the linear estimate says so, the answer is mostly just below it:
    the estimate leaves out some bytes, such as those that a tensor is recomputed from. So the
    search goes down from there in steps that double.

    step: the smallest step that matters.
    expected: the linear estimate of the answer (None: unknown).
    """
    default_size = (low + high) // 2 if high <= MAX_SIZE else min(GROWTH * low, MAX_SIZE)
    if expected is None or expected < low or expected > MAX_SIZE:
        return default_size
    if expected >= high:
        n_failed = sum(candidate.solution.schedule is None for candidate in candidates)
        return max(default_size, high - (step << max(0, n_failed - 1)))
    at = max(expected, low + step)
    return at if high <= MAX_SIZE else min(at, default_size)


def _expected_largest(candidates: Sequence[Candidate]) -> int | None:
    """The largest size that fits if the bytes that each op needs grow linearly (None: unknown).

    The bytes that an op needs are those that every schedule holds while it runs. If the search for
    the least budget ended above them at another size, the same ratio is assumed here.
    """
    steps = {c.size: c.solution.step for c in candidates}
    if len(steps) < 2:
        return None
    a, b = sorted(steps)[-2:]
    obstacles = (c.solution.obstacle for c in candidates)
    excess_ratio = max((o.reached_bytes / o.proven_bytes for o in obstacles if o), default=1.0)
    available_bytes = candidates[0].solution.request.available_bytes / excess_ratio
    fits = []
    for pair in zip(steps[a].planned, steps[b].planned, strict=False):
        least_a, least_b = (StorageGraph.of(graph).least_bytes for graph in pair)
        if len(least_a) == len(least_b) and (grows := least_b > least_a).any():
            slope = (least_b - least_a)[grows] / (b - a)
            fits.append(a + int(((available_bytes - least_a[grows]) / slope).min()))
    return max(fits, default=None)
