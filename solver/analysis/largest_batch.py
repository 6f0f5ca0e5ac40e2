"""The largest batch, or sequence, whose plan fits the budget: by planning alone.

Each candidate is traced and planned like any other step, nothing is run. The search gallops from
where it starts, doubling while a plan fits (halving while none does), then bisects. It assumes that
what fits at a size fits at every smaller one, which holds for steps that grow with the batch; a
candidate for which the time limit found nothing counts as one that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from solver.common import interrupted
from solver.schedule import Solution

Size = Literal["batch_size", "seq_length"]

FIRST: Mapping[Size, int] = {"batch_size": 1, "seq_length": 128}
"""Where the search starts unless the command line says otherwise."""
RESOLUTION: Mapping[Size, int] = {"batch_size": 2**60, "seq_length": 64}
"""The answer is exact below this size, and within this part of itself above: lengths are long, and
rarely wanted to the token."""
MOST = 2**20
"""Where the search gives up growing."""
PAYS = 0.01
"""More stops paying at the smallest candidate within this share of the best rate."""


class SameStepError(ValueError):
    """Two sizes give the same step: what makes the batch does not use the size."""


class CannotBeMadeError(ValueError):
    """There is no step of this size; the message says why. It counts as one that does not fit."""


@dataclass(frozen=True)
class Candidate:
    """One size and its answer."""

    size: int
    solution: Solution

    @property
    def rate_per_s(self) -> float | None:
        """Samples (or positions of each sequence) in a second; None without a plan."""
        simulation = self.solution.simulation
        return (
            None if simulation is None or simulation.time_s == 0 else self.size / simulation.time_s
        )


@dataclass(frozen=True)
class SizeSearch:
    """candidates: smallest size first. refused: sizes of which no step could be made, and why.
    interrupted: Ctrl-C ended the search.
    """

    size: Size
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[int, str], ...] = ()
    interrupted: bool = False

    @property
    def largest(self) -> Candidate | None:
        """The largest that has a plan; None: not even the smallest that was tried has one."""
        found = [c for c in self.candidates if c.solution.schedule is not None]
        return max(found, key=lambda c: c.size, default=None)

    @property
    def beyond(self) -> Candidate | None:
        """The smallest size above `largest` that was tried; None: the search was cut short."""
        least = 0 if self.largest is None else self.largest.size
        return min((c for c in self.candidates if c.size > least), key=_size, default=None)

    @property
    def pays_until(self) -> Candidate | None:
        """The smallest candidate whose rate is within PAYS of the best: more is not faster."""
        rates = [(c, c.rate_per_s) for c in self.candidates if c.rate_per_s is not None]
        best = max((rate for _, rate in rates if rate is not None), default=None)
        if best is None:
            return None
        return next(c for c, rate in rates if rate is not None and rate >= (1 - PAYS) * best)


def largest(
    plan: Callable[[int], Solution],
    *,
    size: Size = "batch_size",
    first: int | None = None,
    on_candidate: Callable[[Candidate], None] | None = None,
) -> SizeSearch:
    """Search for the largest size whose plan fits.

    plan: the answer for one size, with a schedule or without; may raise CannotBeMadeError for any
    but the first. first: where to start (None: FIRST).
    Cost: about twice the logarithm of the answer plans.

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
    """A size that fits (0: none does) and one that does not, the first above it that was tried."""
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
    """Plans, each made once."""

    def __init__(
        self,
        plan: Callable[[int], Solution],
        on_candidate: Callable[[Candidate], None] | None,
    ) -> None:
        self.candidates: list[Candidate] = []
        self.refused: list[tuple[int, str]] = []
        self._plan = plan
        self._on_candidate = on_candidate

    def fits(self, size: int) -> bool:
        try:
            solution = self._plan(size)
        except CannotBeMadeError as error:
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
                    f"sizes {other.size} and {size} give the same step: what makes the batch does "
                    "not use the size that it is given"
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
