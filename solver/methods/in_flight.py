"""Any method, for a step of which several micro-batches are in flight.

What the others hold is what the schedule itself saves for backward (`solver.bound.in_flight`). With
a cap on that, a *span graph* of no width, the step is one that every method can plan. So the search
is over one number, by branch and bound: of the spans that cover all that can be saved, take the one
with the least bound, and do what has not been done for it:

1. Bound all of its schedules at once by cuts (`solver.bound.in_flight_cuts`). For `auto` they are
   an integer program, whose solution is replayed; while that overflows, the position at which it
   does so joins the program. Mostly a replay soon meets the bound. Else the method plans for the
   saved bytes of the solution.
2. Have the method plan for the span itself, which may sharpen the bound.
3. Halve it, and bound both halves by linear programs. For `auto`
   one that is narrow is closed instead, with the gap that it has.

Done when no span is left whose bound is more than GAP below the best schedule.

Optimal within GAP where the method is (`ilp`), and wherever the gap closes. Falls short where the
method finds nothing for a cap for which there is a schedule, and where N_PLANNED ends the search.
Cost: for each span some programs and up to two runs of the method; one span for most steps.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphs.graph import Graph
from solver.bound import (
    Span,
    SpanCut,
    StorageGraph,
    binding_cut,
    bounded,
    halves,
    least_time_s,
    of_step,
    sharpened,
    span_graph,
    whole_span,
)
from solver.methods.auto import fold_simulation, schedule_from_cuts
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import IllegalScheduleError, baseline
from solver.sizes_deadlines_progress import OutOfTimeError

GAP = 5e-4
"""Of the baseline's time: a span whose bound is within this of the best schedule is closed."""
N_NARROW = 64
"""Of the whole span: spans of this share of it, and narrower ones, are narrow."""
N_TOGETHER = 4
"""Positions of one program at most, beside TURN."""
N_PLANNED, N_PLANNED_QUICKLY = 24, 8
"""Runs of the method at most."""
RETRIES = (0.5, 0.25, 0.125, 0.0)
"""Of the whole span: caps that are tried where nothing has been found."""

Propose = Callable[..., Proposal]


def in_flight(propose: Propose, *, replays: bool = False) -> Propose:
    """The method for steps with any number of micro-batches in flight.

    replays: solve the cuts by integer programming, and try what they say. Schedules of other
        methods are their own.
    """

    @functools.wraps(propose)
    def proposed(graph: Graph, **options: Any) -> Proposal:
        if graph.n_in_flight == 1:
            return propose(graph, **options)
        limits = {name: options.pop(name) for name in ("budget_bytes", "time_limit_s")}
        with _Search(graph, propose, options, replays=replays, **limits) as search:
            search.run()
        return search.proposal()

    return proposed


@dataclass(frozen=True, order=True)
class _Open:
    """A span that is open: the least is the one that bounds all. n_done: of the three steps."""

    cut: SpanCut
    n_done: int = 0


class _Search(BestSoFar):
    """The spans that are open, as a heap; with the closed ones they cover all that can be saved.

    closed_share: the least bound of the closed ones.
    """

    def __init__(
        self,
        graph: Graph,
        propose: Propose,
        options: dict[str, Any],
        *,
        replays: bool,
        budget_bytes: int,
        time_limit_s: float,
    ) -> None:
        super().__init__(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
        self._propose, self._replays = propose, replays
        self._starts = options.get("starts", ())
        self._takes_starts = "starts" in options
        self._options = {**options, "starts": ()} if self._takes_starts else options
        self._n_left = N_PLANNED_QUICKLY if options.get("quick") else N_PLANNED
        self._caps: set[int] = set()
        self._whole = whole_span(graph, budget_bytes=budget_bytes)
        self._open = [_Open(SpanCut(self._whole))]
        self._closed_share = math.inf

    def run(self) -> None:
        if self.fits(baseline(self.graph)) or math.isinf(self._whole.lost_share):
            return
        for schedule in self._starts:
            self.fits(schedule)
        self._open = [self._opened(self._whole)]
        while self.best_share - self.open_share > GAP and not self.time_is_up():
            if self._n_left <= 0:
                break
            first = heapq.heappop(self._open)
            try:
                self._look_at(first)
            except OutOfTimeError:  # it stays open: without it the spans would not cover all
                heapq.heappush(self._open, first)
                raise
        if self.best is not None or math.isinf(min(self.open_share, self._closed_share)):
            return
        for share in RETRIES:  # smaller and smaller caps
            if self.best is None:
                self._plan_for_cap(self._whole.least_bytes + int(share * self._whole.width_bytes))

    @property
    def open_share(self) -> float:
        """The least bound of the open spans; inf where none is left."""
        return self._open[0].cut.span.lost_share if self._open else math.inf

    def proposal(self) -> Proposal:
        proven_share = min(self.open_share, self._closed_share, self.best_share)
        bound_s = least_time_s(self.graph, lost_share=proven_share)
        return dataclasses.replace(super().proposal(), lower_bound_s=bound_s)

    def _look_at(self, first: _Open) -> None:
        """Bound it better, or halve it, or close it."""
        cut, span, n_done = first.cut, first.cut.span, first.n_done + 1
        is_narrow = self._is_narrow(span)
        if n_done == 1:
            cut = self._sharpened(cut) if self._replays else cut
            if self.best_share - cut.span.lost_share > GAP:
                saved_bytes = span.most_bytes if cut.saved_bytes is None else cut.saved_bytes
                self._plan_for_cap(saved_bytes)
            heapq.heappush(self._open, _Open(cut, n_done))
        elif n_done == 2 and (is_narrow or self.best is not None):
            cut = dataclasses.replace(cut, span=self._planned(span))
            heapq.heappush(self._open, _Open(cut, n_done))
        elif span.width_bytes and not (is_narrow and self._replays):
            for half in halves(span):
                heapq.heappush(self._open, self._opened(half, cut))
        else:
            self._closed_share = min(self._closed_share, span.lost_share)

    def _is_narrow(self, span: Span) -> bool:
        return span.width_bytes * N_NARROW <= self._whole.width_bytes

    def _opened(self, span: Span, around: SpanCut | None = None) -> _Open:
        """around: the cut of a span that this one is a part of. If this one has its solution in it,
        it has the same."""
        cut = bounded(self.graph, span, budget_bytes=self.budget_bytes, deadline=self.deadline)
        if around is None or around.saved_bytes is None or cut.span.lost_share > span.lost_share:
            return _Open(cut)
        if not span.least_bytes <= around.saved_bytes <= span.most_bytes:
            return _Open(cut)
        # The method would prove less of it, unless it is narrow.
        n_done = 1 if self._is_narrow(span) else 2
        return _Open(dataclasses.replace(around, span=cut.span), n_done)

    def _sharpened(self, cut: SpanCut) -> SpanCut:
        """The cut by integer programming; where the schedule of the solution overflows joins it."""
        while True:
            cut = sharpened(
                self.graph,
                cut,
                budget_bytes=self.budget_bytes,
                gap=GAP / 2,
                deadline=self.deadline,
            )
            if not cut.kept or self.best_share - cut.span.lost_share <= GAP:
                return cut
            over = self._overflow(cut)
            if over is None or over in cut.positions or len(cut.positions) == N_TOGETHER:
                return cut
            cut = dataclasses.replace(cut, positions=tuple(sorted({*cut.positions, over})))

    def _overflow(self, cut: SpanCut) -> int | None:
        """Try the schedule that holds what the solution does. Where in the span graph it is
        furthest above the budget; None: nowhere, or it is illegal."""
        folded = StorageGraph.of(span_graph(self.graph, cut.span, budget_bytes=self.budget_bytes))
        schedule = of_step(self.graph, schedule_from_cuts(folded, cut.kept, deadline=self.deadline))
        try:
            played = fold_simulation(StorageGraph.of(self.graph), schedule)
        except IllegalScheduleError:
            return None
        if self.keep(schedule, played.simulation):
            return None
        fullest = int(np.argmax(played.stage_bytes[: len(self.graph.nodes)]))
        return folded.position[self.graph.nodes[fullest].name]

    def _plan_for_cap(self, saved_bytes: int) -> None:
        """Have the method plan for schedules that save no more, beside others that save as much."""
        if saved_bytes not in self._caps:
            self._caps.add(saved_bytes)
            self._propose_for(Span(0.0, saved_bytes, saved_bytes), worth_below=self.best_share)

    def _planned(self, span: Span) -> Span:
        """With the method's bound on the span."""
        proposal = self._propose_for(span, worth_below=self.best_share - GAP)
        baseline_s = self.graph.baseline_time_s or 1.0
        lost_share = proposal.lower_bound_s / baseline_s - 1.0
        if not proposal.lower_bound_s:  # the method proves nothing
            folded = StorageGraph.of(span_graph(self.graph, span, budget_bytes=self.budget_bytes))
            lost_share = binding_cut(
                folded, budget_bytes=self.budget_bytes, deadline=self.deadline
            ).lost_share
        return dataclasses.replace(span, lost_share=max(span.lost_share, lost_share))

    def _propose_for(self, span: Span, *, worth_below: float) -> Proposal:
        """What the method proposes for the span graph; its schedule is tried on the step.

        worth_below: the method may end where it proves that as much is lost.
        """
        self._n_left -= 1
        self.deadline.check()
        worth = {"worth_below_share": worth_below} if self._takes_starts else {}
        proposal = self._propose(
            span_graph(self.graph, span, budget_bytes=self.budget_bytes),
            budget_bytes=self.budget_bytes,
            time_limit_s=self.deadline.left_s / 2,
            **self._options,
            **worth,
        )
        self.timed_out = self.timed_out or proposal.timed_out
        if proposal.schedule is not None:
            self.fits(of_step(self.graph, proposal.schedule))
        return proposal
