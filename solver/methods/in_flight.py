"""Make any method plan steps with several micro-batches in flight.

What the other micro-batches hold is what the schedule itself saves for backward
(`solver.bound.in_flight`). If that is capped, by a *span graph* whose span is a single number, the
step is one that every method can plan. So the search is over one number, by branch and bound. Of
the spans that cover everything that can be saved, take the one with the least bound, and do the
first of these that has not been done for it:

1. Bound all of its schedules at once by cuts (`solver.bound.in_flight_cuts`). For `auto` they are
   solved as an integer program, and the solution is turned into a schedule. While that exceeds the
   budget, the position at which it does joins the program. Mostly the schedule soon meets the
   bound. Otherwise the method plans for the saved bytes of the solution.
2. Have the method plan for the span itself, which may sharpen the bound.
3. Halve it, and bound both halves by LPs. For `auto` a narrow span is closed instead, with the gap
   that it has.

The search ends when no span has a bound more than GAP below the best schedule.

Optimal within GAP if the method is (`ilp`), and wherever the gap closes. Falls short if the method
finds no schedule for a cap that has one, and if MAX_PLANS ends the search. Cost: for each span some
programs and up to two runs of the method; one span for most steps.
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
    bound_by_lps,
    bound_by_milp,
    halves,
    least_time_s,
    span_graph,
    whole_span,
    without_span_nodes,
)
from solver.methods.auto import fold_simulation, schedule_from_cuts
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import IllegalScheduleError, baseline
from solver.sizes_deadlines_progress import OutOfTimeError

GAP = 5e-4
"""A span whose bound is within this share of the baseline's time of the best schedule is closed."""
N_NARROW = 64
"""A span is narrow if it is at most one N_NARROW-th of the whole span."""
MAX_CUT_POSITIONS = 4
"""Maximum positions of one program, besides FORWARD_END."""
MAX_PLANS, MAX_PLANS_QUICK = 24, 8
"""Maximum runs of the method."""
RETRIES = (0.5, 0.25, 0.125, 0.0)
"""Caps that are tried if nothing has been found, as shares of the whole span."""

Propose = Callable[..., Proposal]


def in_flight(propose: Propose, *, uses_milps: bool = False) -> Propose:
    """Extend the method to steps with any number of micro-batches in flight.

    uses_milps: solve the cuts as integer programs, and try the schedules of their solutions.
        Methods without it only propose their own schedules.
    """

    @functools.wraps(propose)
    def propose_in_flight(graph: Graph, **options: Any) -> Proposal:
        if graph.n_in_flight == 1:
            return propose(graph, **options)
        limits = {name: options.pop(name) for name in ("budget_bytes", "time_limit_s")}
        with _Search(graph, propose, options, uses_milps=uses_milps, **limits) as search:
            search.run()
        return search.proposal()

    return propose_in_flight


@dataclass(frozen=True, order=True)
class _OpenSpan:
    """An open span; the least of all open spans bounds all of them.

    n_done: how many of the three steps have been done for it.
    """

    cut: SpanCut
    n_done: int = 0


class _Search(BestSoFar):
    """The open spans, as a heap. Together with the closed ones they cover all that can be saved.

    closed_share: the least bound of the closed spans.
    """

    def __init__(
        self,
        graph: Graph,
        propose: Propose,
        options: dict[str, Any],
        *,
        uses_milps: bool,
        budget_bytes: int,
        time_limit_s: float,
    ) -> None:
        super().__init__(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
        self._propose, self._uses_milps = propose, uses_milps
        self._starts = options.get("starts", ())
        self._takes_starts = "starts" in options
        self._options = {**options, "starts": ()} if self._takes_starts else options
        self._n_plans_left = MAX_PLANS_QUICK if options.get("quick") else MAX_PLANS
        self._caps: set[int] = set()
        self._whole_span = whole_span(graph, budget_bytes=budget_bytes)
        self._open_spans = [_OpenSpan(SpanCut(self._whole_span))]
        self._closed_share = math.inf

    def run(self) -> None:
        if self.fits(baseline(self.graph)) or math.isinf(self._whole_span.lost_share):
            return
        for schedule in self._starts:
            self.fits(schedule)
        self._open_spans = [self._bounded_open_span(self._whole_span)]
        while self.best_share - self.open_share > GAP and not self.time_is_up():
            if self._n_plans_left <= 0:
                break
            open_span = heapq.heappop(self._open_spans)
            try:
                self._do_next_step(open_span)
            except OutOfTimeError:  # it stays open, so that the spans still cover everything
                heapq.heappush(self._open_spans, open_span)
                raise
        if self.best is not None or math.isinf(min(self.open_share, self._closed_share)):
            return
        for share in RETRIES:  # smaller and smaller caps
            if self.best is None:
                self._plan_for_cap(
                    self._whole_span.least_bytes + int(share * self._whole_span.width_bytes)
                )

    @property
    def open_share(self) -> float:
        """The least bound of the open spans; inf if none is open."""
        return self._open_spans[0].cut.span.lost_share if self._open_spans else math.inf

    def proposal(self) -> Proposal:
        proven_share = min(self.open_share, self._closed_share, self.best_share)
        bound_s = least_time_s(self.graph, lost_share=proven_share)
        return dataclasses.replace(super().proposal(), lower_bound_s=bound_s)

    def _do_next_step(self, open_span: _OpenSpan) -> None:
        """Do the next step for this span: bound it better, halve it, or close it."""
        cut, span, n_done = open_span.cut, open_span.cut.span, open_span.n_done + 1
        is_narrow = self._is_narrow(span)
        if n_done == 1:
            cut = self._bound_by_milps(cut) if self._uses_milps else cut
            if self.best_share - cut.span.lost_share > GAP:
                saved_bytes = span.most_bytes if cut.saved_bytes is None else cut.saved_bytes
                self._plan_for_cap(saved_bytes)
            heapq.heappush(self._open_spans, _OpenSpan(cut, n_done))
        elif n_done == 2 and (is_narrow or self.best is not None):
            cut = dataclasses.replace(cut, span=self._bound_by_method(span))
            heapq.heappush(self._open_spans, _OpenSpan(cut, n_done))
        elif span.width_bytes and not (is_narrow and self._uses_milps):
            for half in halves(span):
                heapq.heappush(self._open_spans, self._bounded_open_span(half, cut))
        else:
            self._closed_share = min(self._closed_share, span.lost_share)

    def _is_narrow(self, span: Span) -> bool:
        return span.width_bytes * N_NARROW <= self._whole_span.width_bytes

    def _bounded_open_span(self, span: Span, around: SpanCut | None = None) -> _OpenSpan:
        """An open span, bounded by LPs.

        around: the cut of a larger span that this one is part of. If its solution lies in this span
            and this span's own LPs prove no more, it serves as this span's cut as well.
        """
        cut = bound_by_lps(self.graph, span, budget_bytes=self.budget_bytes, deadline=self.deadline)
        if around is None or around.saved_bytes is None or cut.span.lost_share > span.lost_share:
            return _OpenSpan(cut)
        if not span.least_bytes <= around.saved_bytes <= span.most_bytes:
            return _OpenSpan(cut)
        # Unless the span is narrow, skip step 2: the method would prove less.
        n_done = 1 if self._is_narrow(span) else 2
        return _OpenSpan(dataclasses.replace(around, span=cut.span), n_done)

    def _bound_by_milps(self, cut: SpanCut) -> SpanCut:
        """Solve the cut as an integer program, adding positions at which its schedule overflows."""
        while True:
            cut = bound_by_milp(
                self.graph,
                cut,
                budget_bytes=self.budget_bytes,
                gap=GAP / 2,
                deadline=self.deadline,
            )
            if not cut.kept or self.best_share - cut.span.lost_share <= GAP:
                return cut
            overflow_position = self._try_schedule_of_cut(cut)
            if (
                overflow_position is None
                or overflow_position in cut.positions
                or len(cut.positions) == MAX_CUT_POSITIONS
            ):
                return cut
            cut = dataclasses.replace(
                cut, positions=tuple(sorted({*cut.positions, overflow_position}))
            )

    def _try_schedule_of_cut(self, cut: SpanCut) -> int | None:
        """Try the schedule that keeps what the cut's solution keeps.

        Returns the position in the span graph at which it is furthest above the budget; None if it
        fits or is illegal.
        """
        folded = StorageGraph.of(span_graph(self.graph, cut.span, budget_bytes=self.budget_bytes))
        schedule = without_span_nodes(
            self.graph, schedule_from_cuts(folded, cut.kept, deadline=self.deadline)
        )
        try:
            folded_simulation = fold_simulation(StorageGraph.of(self.graph), schedule)
        except IllegalScheduleError:
            return None
        if self.keep_if_best(schedule, folded_simulation.simulation):
            return None
        fullest_position = int(np.argmax(folded_simulation.stage_bytes[: len(self.graph.nodes)]))
        return folded.position[self.graph.nodes[fullest_position].name]

    def _plan_for_cap(self, saved_bytes: int) -> None:
        """Have the method plan for schedules that save at most saved_bytes.

        The other micro-batches are assumed to save as much each.
        """
        if saved_bytes not in self._caps:
            self._caps.add(saved_bytes)
            self._propose_for(
                Span(0.0, saved_bytes, saved_bytes), worth_below_share=self.best_share
            )

    def _bound_by_method(self, span: Span) -> Span:
        """The span with the method's bound on it."""
        proposal = self._propose_for(span, worth_below_share=self.best_share - GAP)
        baseline_s = self.graph.baseline_time_s or 1.0
        lost_share = proposal.lower_bound_s / baseline_s - 1.0
        if not proposal.lower_bound_s:  # the method proves nothing
            folded = StorageGraph.of(span_graph(self.graph, span, budget_bytes=self.budget_bytes))
            lost_share = binding_cut(
                folded, budget_bytes=self.budget_bytes, deadline=self.deadline
            ).lost_share
        return dataclasses.replace(span, lost_share=max(span.lost_share, lost_share))

    def _propose_for(self, span: Span, *, worth_below_share: float) -> Proposal:
        """Have the method plan for the span graph, and try its schedule on the step.

        worth_below_share: the method may end when it has proven that schedules lose as much.
        """
        self._n_plans_left -= 1
        self.deadline.check()
        worth_option = {"worth_below_share": worth_below_share} if self._takes_starts else {}
        proposal = self._propose(
            span_graph(self.graph, span, budget_bytes=self.budget_bytes),
            budget_bytes=self.budget_bytes,
            time_limit_s=self.deadline.left_s / 2,
            **self._options,
            **worth_option,
        )
        self.timed_out = self.timed_out or proposal.timed_out
        if proposal.schedule is not None:
            self.fits(without_span_nodes(self.graph, proposal.schedule))
        return proposal
