"""What a search for one graph and one budget has so far: best schedule, best bound, reruns seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from solver.bound import FoldedGraph
from solver.common import Deadline
from solver.methods.auto.from_cuts import FoldedSimulation, fold_simulation
from solver.methods.proposal import Proposal
from solver.schedule import OPTIMAL_GAP, IllegalScheduleError, Schedule

DONE_GAP = 3e-4
"""Of the baseline's time: a little more than what the cuts are solved to (`solver.bound.cut`)."""


@dataclass
class Search:
    """The best schedule and the best bound so far.

    lost_share: proven, as a share of the baseline's time. reruns: (node, moment) for every node
    that some schedule offered ran again right before that moment. work: of the evictions, as
    `Evicted` counts it. timed_out: there is no time left. cut_short: the clock has ended a program
    on the way, so that a slower machine may find another answer. kept_s: of the time, for saying
    why nothing was found; a search that has found something needs none of it.
    """

    folded: FoldedGraph
    budget_bytes: int
    end: Deadline
    best: FoldedSimulation | None = None
    lost_share: float = 0.0
    timed_out: bool = False
    cut_short: bool = False
    reruns: set[tuple[int, int]] = field(default_factory=set)
    work: int = 0
    kept_s: float = 0.0

    def offer(self, schedule: Schedule, *, on_menu: bool = True) -> FoldedSimulation | None:
        """Judge it; keep it if it fits and is faster than the best. None: not legal, or too late.

        on_menu: whether its reruns count as seen even if it is not kept.
        """
        if self.best is not None and self.deadline.passed:
            return None
        try:
            played = fold_simulation(self.folded, schedule)
        except IllegalScheduleError:
            return None
        best = played.simulation.peak_bytes <= self.budget_bytes and (
            self.best is None or played.simulation.time_s < self.best.simulation.time_s
        )
        if best:
            self.best = played
        if best or on_menu:
            self.reruns |= played.reruns
        return played

    @property
    def best_share(self) -> float:
        """Time that the best schedule loses, as a share of the baseline's; inf without one."""
        if self.best is None:
            return math.inf
        baseline_s = self.folded.graph.baseline_time_s
        lost_s = self.best.simulation.time_s - baseline_s
        return lost_s / baseline_s if baseline_s else 0.0

    @property
    def gap(self) -> float:
        """What is left between the best schedule and the bound, as a share of the baseline."""
        return self.best_share - self.lost_share

    @property
    def deadline(self) -> Deadline:
        """When the search has to end, as things stand."""
        return self.end.earlier(self.kept_s if self.best is None else 0.0)

    @property
    def left_s(self) -> float:
        return self.deadline.left_s

    @property
    def done(self) -> bool:
        if self.deadline.passed:
            self.timed_out = True
        return self.timed_out or self.gap <= DONE_GAP or math.isinf(self.lost_share)

    @property
    def close(self) -> bool:
        """Whether more search is not worth its time: optimal as `Solution` says it, or done."""
        return self.done or self.gap <= OPTIMAL_GAP

    def proposal(self) -> Proposal:
        baseline_s = self.folded.graph.baseline_time_s
        return Proposal(
            schedule=self.best.schedule if self.best else None,
            lower_bound_s=baseline_s * (1.0 + self.lost_share),
            timed_out=self.timed_out or self.cut_short,
        )
