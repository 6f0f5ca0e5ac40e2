"""Cuts at FORWARD_END and another position, for a step with several micro-batches in flight.

In a span graph (`solver.bound.in_flight`) each of the other micro-batches holds only the span's
least_bytes, so a single cut of a wide span proves little. A cut at FORWARD_END and at a position p
together proves more. The saved bytes s are those on the device at FORWARD_END, an expression in
columns of the same program. So besides the byte row of p there is, with m micro-batches in flight,
the row

    bytes on the device at p  +  (m - 1) * (s - least bytes of the span)  <=  budget

since each of the others holds at least s while p runs. This bounds the whole span at once, however
wide it is, and the solution suggests how much to save.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from graphs.graph import Graph
from solver.bound.cut import CutMilp
from solver.bound.in_flight import BACKWARD_END, FORWARD_END, Span, span_graph
from solver.bound.lower_bound import fullest_positions
from solver.bound.storage_graph import StorageGraph
from solver.sizes_deadlines_progress import NEVER, Deadline

N_POSITIONS = 6
"""Maximum number of positions of a span graph whose LPs are solved."""
MAX_SEARCH_NODES = 300
"""Maximum branch-and-bound nodes of one MILP."""


@dataclass(frozen=True, order=True)
class SpanCut:
    """The strongest cut found for a span.

    span: its lost_share is what the cut proves.
    positions: in its span graph, besides FORWARD_END; empty if no position exceeds the budget, or
        nothing fits.
    kept: by position, including FORWARD_END, the units that the MILP's solution keeps on the
        device.
    saved_bytes: what the solution saves; None if there is no solution, or if FORWARD_END is no part
        of the cut because no other micro-batch is in flight at its positions.
    """

    span: Span
    positions: tuple[int, ...] = field(default=(), compare=False)
    kept: Mapping[int, frozenset[int]] = field(default_factory=dict, compare=False)
    saved_bytes: int | None = field(default=None, compare=False)


def bound_by_lps(
    graph: Graph, span: Span, *, budget_bytes: int, deadline: Deadline = NEVER
) -> SpanCut:
    """Bound the schedules of a span by LPs, in milliseconds."""
    folded = StorageGraph.of(span_graph(graph, span, budget_bytes=budget_bytes))
    if int(np.max(folded.least_bytes)) > budget_bytes:
        return SpanCut(dataclasses.replace(span, lost_share=math.inf))
    found = [
        _InFlightCuts(
            graph, folded, span, positions=(position,), budget_bytes=budget_bytes, deadline=deadline
        ).solve(as_milp=False, deadline=deadline)
        for position in _positions(graph, folded, span, budget_bytes=budget_bytes)
    ]
    best = max(found, key=lambda cut: cut.span.lost_share, default=SpanCut(span))
    lost_share = max(span.lost_share, best.span.lost_share)
    return dataclasses.replace(best, span=dataclasses.replace(span, lost_share=lost_share))


def bound_by_milp(
    graph: Graph, cut: SpanCut, *, budget_bytes: int, gap: float, deadline: Deadline = NEVER
) -> SpanCut:
    """Solve the cut again at its positions as a MILP, to within `gap` of the baseline's time."""
    if not cut.positions:
        return cut
    cuts = _InFlightCuts(
        graph,
        StorageGraph.of(span_graph(graph, cut.span, budget_bytes=budget_bytes)),
        cut.span,
        positions=cut.positions,
        budget_bytes=budget_bytes,
        deadline=deadline,
    )
    found = cuts.solve(as_milp=True, gap=gap, deadline=deadline)
    lost_share = max(cut.span.lost_share, found.span.lost_share)
    return dataclasses.replace(found, span=dataclasses.replace(cut.span, lost_share=lost_share))


def _positions(graph: Graph, folded: StorageGraph, span: Span, *, budget_bytes: int) -> list[int]:
    """The fullest positions when each of the other micro-batches holds what the baseline saves."""
    forward_end = folded.position[FORWARD_END]
    outside_bytes = graph.resident_bytes + (graph.n_in_flight - 1) * span.least_bytes
    baseline_saved_bytes = (
        int(folded.baseline_bytes[forward_end] - folded.own_bytes[forward_end]) - outside_bytes
    )
    more_bytes = (graph.n_in_flight - 1) * max(0, baseline_saved_bytes - span.least_bytes)
    return fullest_positions(folded, budget_bytes=budget_bytes - more_bytes)[:N_POSITIONS]


class _InFlightCuts(CutMilp):
    """Cuts at these positions, and at FORWARD_END if other micro-batches are in flight there."""

    def __init__(
        self,
        graph: Graph,
        folded: StorageGraph,
        span: Span,
        *,
        positions: tuple[int, ...],
        budget_bytes: int,
        deadline: Deadline,
    ) -> None:
        self._graph, self._span, self._given_positions = graph, span, positions
        self._forward_end = folded.position[FORWARD_END]
        end = folded.position.get(BACKWARD_END, folded.n_nodes)
        self._bytes_of_columns: dict[int, dict[int, int]] = {}
        # From BACKWARD_END on no other micro-batch is in flight, and at FORWARD_END the span
        # graph's rows suffice.
        with_others = [p for p in positions if p < end and p != self._forward_end]
        all_positions = sorted({*positions, self._forward_end}) if with_others else positions
        super().__init__(
            folded, positions=all_positions, budget_bytes=budget_bytes, deadline=deadline
        )
        for p in with_others:
            self._limit_with_others(p)

    def solve(self, *, as_milp: bool, gap: float = 0.0, deadline: Deadline) -> SpanCut:
        """Solve as an LP or, if `as_milp`, as a MILP that stops when its bound is within `gap`."""
        n_nodes = None
        if as_milp:
            self.count_equal_columns()
            n_nodes = max(1, min(MAX_SEARCH_NODES, self.program.n_affordable_nodes))
        answer = self.program.solve(as_milp=as_milp, gap=gap, node_limit=n_nodes, deadline=deadline)
        cuts = self.to_cuts(answer)
        span = dataclasses.replace(self._span, lost_share=cuts.lost_share)
        kept = cuts.kept if as_milp and cuts.kept else {}
        saved_bytes = None
        if answer.values is not None and self._forward_end in self._bytes_of_columns:
            shares = (
                n * answer.values[column]
                for column, n in self._bytes_of_columns[self._forward_end].items()
            )
            found = self._pinned_bytes + round(math.fsum(shares))
            saved_bytes = min(max(found, span.least_bytes), span.most_bytes)
        return SpanCut(span, self._given_positions, kept, saved_bytes)

    @property
    def _pinned_bytes(self) -> int:
        """Bytes that every schedule saves at FORWARD_END."""
        n_others = self._graph.n_in_flight - 1
        outside_bytes = self._graph.resident_bytes + n_others * self._span.least_bytes
        return int(self.folded.held_bytes[self._forward_end]) - outside_bytes

    def _add_bytes(self, p: int, keep: Mapping[int, int]) -> None:
        super()._add_bytes(p, keep)
        self._bytes_of_columns[p] = self.counted_bytes(keep, p)

    def _limit_with_others(self, p: int) -> None:
        """Add the row of the module for position p."""
        n_others, sizes = self._graph.n_in_flight - 1, dict(self._bytes_of_columns[p])
        for column, size_bytes in self._bytes_of_columns[self._forward_end].items():
            sizes[column] = sizes.get(column, 0) + n_others * size_bytes
        room = self.room_bytes(p) - n_others * (self._pinned_bytes - self._span.least_bytes)
        self.add_byte_row(sizes, room)
