"""What `auto` has found so far for one graph and one budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from solver.bound import Binding, StorageGraph, least_time_s
from solver.methods.auto.from_cuts import FoldedSimulation, fold_simulation, schedule_from_cuts
from solver.methods.auto.local_optimum import drop_recomputation
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import OPTIMAL_GAP, IllegalScheduleError, Schedule

DONE_GAP = 3e-4
"""The search is done at this gap, a share of the baseline's time: a little more than the gap to
which cuts are solved (`solver.bound.cut`).
"""

TIME_ROUNDING = 1e-9
"""Relative error of sums of the same times in another order."""


class Search(BestSoFar):
    """The best schedule and the best bound so far, and what the stages hand to each other.

    binding: the strongest single cut.
    guide: by position, units that the several cuts hold there; eviction drops them last.
    menus: for each schedule, the set of (node, position) for every node that it recomputed right
        before that position; equal sets once, in the order in which they were found.
    work: of the evictions, as `evict` counts it.
    is_nested: on a large step nested reversals proved far more than cuts, so no other stage is run.
    """

    def __init__(
        self,
        folded: StorageGraph,
        *,
        budget_bytes: int,
        time_limit_s: float,
        worth_below_share: float = math.inf,
    ) -> None:
        """Start a search.

        worth_below_share: schedules that lose this share of the baseline's time or more are of no
            interest.
        """
        super().__init__(folded.graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
        self.folded = folded
        self._worth_below_share = worth_below_share
        self.binding = Binding(0.0, (), None)
        self.guide: Mapping[int, frozenset[int]] = {}
        self.menus: dict[frozenset[tuple[int, int]], None] = {}
        self.work = 0
        self.is_nested = False

    def offer(self, schedule: Schedule, *, on_menu: bool = True) -> FoldedSimulation | None:
        """Simulate the schedule and keep it if it is the best.

        on_menu: put what it recomputes on the menu even if it is not the best.

        Returns None if it is illegal, or if a schedule is known and the deadline has passed.
        """
        if self.best is not None and self.deadline.passed:
            return None
        try:
            found = fold_simulation(self.folded, schedule)
        except IllegalScheduleError:
            return None
        self.keep_if_best(schedule, found.simulation)
        if on_menu or (self.best is not None and self.best[0] is schedule):
            self.menus[found.recomputed] = None
        return found

    def offer_cuts(self, kept: Mapping[int, Collection[int]]) -> FoldedSimulation | None:
        """Offer the schedule that holds these units at these positions. Raises OutOfTimeError."""
        return self.offer(schedule_from_cuts(self.folded, kept, deadline=self.deadline))

    def offer_improved(self, schedule: Schedule) -> None:
        """Offer the schedule without recomputation for which there is room."""
        improved = drop_recomputation(
            self.folded, schedule, budget_bytes=self.budget_bytes, deadline=self.deadline
        )
        self.offer(improved)

    @property
    def still_worth_between_s(self) -> tuple[float, float]:
        """The `worth_between_s` for a method that is run now."""
        least_s = least_time_s(self.graph, lost_share=self.lost_share)
        most_s = math.inf if self.best is None else self.best[1].time_s
        return (1 - TIME_ROUNDING) * least_s, (1 + TIME_ROUNDING) * most_s

    def prove(self, lost_share: float) -> None:
        self.lost_share = max(self.lost_share, lost_share)

    @property
    def is_done(self) -> bool:
        """Whether the time is up, the gap is DONE_GAP, or no schedule of interest can exist."""
        is_lost = math.isinf(self.lost_share) or self.lost_share >= self._worth_below_share
        return self.time_is_up() or self.gap <= DONE_GAP or is_lost

    @property
    def is_close(self) -> bool:
        """Whether more search is not worth its time: the gap counts as closed, or `is_done`."""
        return self.is_done or self.gap <= OPTIMAL_GAP

    def proposal(self) -> Proposal:
        return Proposal(
            schedule=self.best[0] if self.best else None,
            lower_bound_s=least_time_s(self.graph, lost_share=self.lost_share),
            timed_out=self.time_is_up(),  # in the last stage, perhaps
        )
