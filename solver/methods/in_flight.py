"""Any method, for a step of which several micro-batches are in flight.

What the others hold is what the schedule itself saves for backward (`solver.bound.in_flight`). With
a cap on that, a *span graph* of no width, the step is one that every method can plan. So the search
is over one number, by branch and bound: of the spans that cover all that can be saved, take the one
with the least bound. Until a schedule is known, halve it while it is wide, and bound both halves by
linear programs. Have the method plan for the upper end of a narrow span, which may give a better
schedule, and for the span itself, which sharpens its bound; then halve it. Done when no span is
left whose bound is more than GAP below the best schedule. Where saving less costs more and leaves
more room, the spans close in on the point at which the two are even.

Optimal within GAP where the method is (`ilp`), and wherever the gap closes. Falls short where the
method finds nothing for a cap for which there is a schedule, and where N_PLANNED ends the search.
Cost: a few linear programs for each span, and about ten runs of the method.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable
from typing import Any

from graphs.graph import Graph
from solver.bound import (
    Span,
    StorageGraph,
    binding_cut,
    bounded,
    halves,
    least_time_s,
    of_step,
    span_graph,
    whole_span,
)
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import baseline
from solver.sizes_deadlines_progress import OutOfTimeError

GAP = 2e-4
"""Of the baseline's time: a span whose bound is within this of the best schedule is closed."""
N_NARROW = 64
"""Of the whole span: spans of this share of it, and narrower ones, are narrow."""
N_PLANNED = 24
"""Runs of the method at most."""
RETRIES = (0.5, 0.25, 0.125, 0.0)
"""Of the whole span: caps that are tried where nothing has been found."""

Propose = Callable[..., Proposal]


def in_flight(propose: Propose) -> Propose:
    """The method for steps with any number of micro-batches in flight."""

    @functools.wraps(propose)
    def proposed(graph: Graph, **options: Any) -> Proposal:
        if graph.n_in_flight == 1:
            return propose(graph, **options)
        limits = {name: options.pop(name) for name in ("budget_bytes", "time_limit_s")}
        with _Search(graph, propose, options, **limits) as search:
            search.run()
        return search.proposal()

    return proposed


class _Search(BestSoFar):
    """The spans that are open, as a heap; with the closed ones they cover all that can be saved.

    planned: open spans for which the method has planned.
    closed_share: the least bound of the closed ones.
    """

    def __init__(
        self,
        graph: Graph,
        propose: Propose,
        options: dict[str, Any],
        *,
        budget_bytes: int,
        time_limit_s: float,
    ) -> None:
        super().__init__(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
        self._propose = propose
        self._starts = options.get("starts", ())
        self._options = {**options, "starts": ()} if "starts" in options else options
        self._n_planned = 0
        self._whole = whole_span(graph, budget_bytes=budget_bytes)
        self._open = [self._whole]
        self._planned: set[Span] = set()
        self._closed_share = math.inf

    def run(self) -> None:
        if self.fits(baseline(self.graph)) or math.isinf(self._whole.lost_share):
            return
        for schedule in self._starts:
            self.fits(schedule)
        while self.best_share - self.open_share > GAP and not self.time_is_up():
            if self._n_planned >= N_PLANNED:
                break
            span = heapq.heappop(self._open)
            try:
                self._look_at(span)
            except OutOfTimeError:  # it stays open: without it the spans would not cover all
                heapq.heappush(self._open, span)
                raise
        if self.best is not None or math.isinf(min(self.open_share, self._closed_share)):
            return
        for share in RETRIES:  # smaller and smaller caps
            if self.best is None:
                most_bytes = self._whole.least_bytes + int(share * self._whole.width_bytes)
                self._planned_for(Span(0.0, most_bytes, most_bytes))

    @property
    def open_share(self) -> float:
        """The least bound of the open spans; inf where none is left."""
        return self._open[0].lost_share if self._open else math.inf

    def proposal(self) -> Proposal:
        proven_share = min(self.open_share, self._closed_share, self.best_share)
        bound_s = least_time_s(self.graph, lost_share=proven_share)
        return dataclasses.replace(super().proposal(), lower_bound_s=bound_s)

    def _look_at(self, span: Span) -> None:
        """Bound it better, or halve it, or close it."""
        is_narrow = span.width_bytes * N_NARROW <= self._whole.width_bytes
        if span not in self._planned and (is_narrow or self.best is not None):
            span = self._sharpened(span, is_narrow=is_narrow)
            self._planned.add(span)
            heapq.heappush(self._open, span)
        elif span.width_bytes:
            for half in halves(span):
                found = bounded(
                    self.graph, half, budget_bytes=self.budget_bytes, deadline=self.deadline
                )
                heapq.heappush(self._open, found)
        else:
            self._closed_share = min(self._closed_share, span.lost_share)

    def _sharpened(self, span: Span, *, is_narrow: bool) -> Span:
        """The method's bound on the span; before, of a narrow one, its schedule for the upper end.

        Of a wide one the upper end is one of many caps, and not likely the best.
        """
        if is_narrow:
            proposal = self._planned_for(dataclasses.replace(span, least_bytes=span.most_bytes))
            if self.best_share - span.lost_share <= GAP:
                return span
        if span.width_bytes or not is_narrow:
            proposal = self._planned_for(span)
        baseline_s = self.graph.baseline_time_s or 1.0
        lost_share = proposal.lower_bound_s / baseline_s - 1.0
        if not proposal.lower_bound_s:  # the method proves nothing
            folded = StorageGraph.of(span_graph(self.graph, span, budget_bytes=self.budget_bytes))
            lost_share = binding_cut(
                folded, budget_bytes=self.budget_bytes, deadline=self.deadline
            ).lost_share
        return dataclasses.replace(span, lost_share=max(span.lost_share, lost_share))

    def _planned_for(self, span: Span) -> Proposal:
        """What the method proposes for the span graph; its schedule is tried on the step."""
        self._n_planned += 1
        self.deadline.check()
        proposal = self._propose(
            span_graph(self.graph, span, budget_bytes=self.budget_bytes),
            budget_bytes=self.budget_bytes,
            time_limit_s=self.deadline.left_s / 2,
            **self._options,
        )
        self.timed_out = self.timed_out or proposal.timed_out
        if proposal.schedule is not None:
            self.fits(of_step(self.graph, proposal.schedule))
        return proposal
