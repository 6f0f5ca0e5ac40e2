"""Search for the largest batch or sequence whose plan fits the budget.

Each candidate is traced and planned; nothing is run. The search takes GROWTH times the size while a
plan fits, or half of it while none does, and then bisects; but first it tries the size that should
be the answer if the bytes that a step needs grow by a line, and its neighbors. It assumes that a
plan that fits at one size exists at every smaller size, which holds for steps that grow with the
batch. A candidate for which nothing was found counts as one that does not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from graphs.rewrites import Variants
from solver.bound import StorageGraph
from solver.schedule import Solution
from solver.sizes_deadlines_progress import interrupted

Size = Literal["batch_size", "seq_length"]

FIRST: Mapping[Size, int] = {"batch_size": 1, "seq_length": 128}
"""The first size to try by default."""
SECOND: Mapping[Size, int] = {"batch_size": 2}
"""The one to begin with where the model refuses the first."""
RESOLUTION: Mapping[Size, int] = {"batch_size": 2**60, "seq_length": 64}
"""The answer is exact below this size and precise to 1/RESOLUTION of itself above."""
GROWTH = 4
"""From one size to the next until one does not fit: a trace costs more than a coarse curve."""
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

    def with_solution(self, size: int, solution: Solution) -> SizeSearch:
        """The same with another answer for this size."""
        others = (Candidate(size, solution) if c.size == size else c for c in self.candidates)
        return dataclasses.replace(self, candidates=tuple(others))

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

    Calls `plan` some log4(answer) + 2 times where the line holds, else about 2 log2(answer) times.

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
        if interrupted() and solution.schedule is None:  # a plan may have been found later
            raise KeyboardInterrupt
        candidates.append(Candidate(at, solution))
        if on_candidate is not None:
            on_candidate(candidates[-1])
        if interrupted():  # `plan` handed over what was best by then
            raise KeyboardInterrupt
        return solution.schedule is not None

    ended = False
    try:
        at, low, high = first or FIRST[size], 0, MOST + 1  # low fits, high does not
        while high - low > (step := max(1, low // RESOLUTION[size])):
            low, high = (at, high) if fits(at) else (low, at)
            at = _next_size(low, high, step, _expected(candidates), candidates)
    except KeyboardInterrupt:
        if all(c.solution.schedule is None for c in candidates):
            raise
        ended = True
    candidates.sort(key=lambda candidate: candidate.size)
    return SizeSearch(size, tuple(candidates), tuple(sorted(refused)), ended)


def _next_size(
    low: int, high: int, step: int, expected: int | None, candidates: Sequence[Candidate]
) -> int:
    """The next size to try between one that fits and one that does not.

    Where the line promises what does not fit, the answer is mostly just below: what no line has,
    such as what a tensor is recomputed from. So the search goes down from there, in steps that
    double.
    """
    plain = (low + high) // 2 if high <= MOST else min(GROWTH * low, MOST)
    if expected is None or expected < low or expected > MOST:
        return plain
    if expected >= high:
        n_failed = sum(candidate.solution.schedule is None for candidate in candidates)
        return max(plain, high - (step << max(0, n_failed - 1)))
    at = max(expected, low + step)
    return at if high <= MOST else min(at, plain)


def _expected(candidates: Sequence[Candidate]) -> int | None:
    """The largest size that fits if the bytes that each op needs grow by a line (None: not known).

    These are the bytes that no schedule goes without; where the search for the least budget did not
    reach them at another size, it is taken to miss them by as much here.
    """
    steps = {c.size: Variants.of(c.solution.variants or c.solution.graph) for c in candidates}
    if len(steps) < 2:
        return None
    a, b = sorted(steps)[-2:]
    obstacles = (c.solution.obstacle for c in candidates)
    missed = max((o.reached_bytes / o.proven_bytes for o in obstacles if o), default=1.0)
    available_bytes = candidates[0].solution.request.available_bytes / missed
    fits = []
    for pair in zip(steps[a].planned, steps[b].planned, strict=False):
        least_a, least_b = (StorageGraph.of(graph).least_bytes for graph in pair)
        if len(least_a) == len(least_b) and (grows := least_b > least_a).any():
            slope = (least_b - least_a)[grows] / (b - a)
            fits.append(a + int(((available_bytes - least_a[grows]) / slope).min()))
    return max(fits, default=None)
