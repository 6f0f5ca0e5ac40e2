"""Lower bound on what several pipeline stages that share a rank's memory lose together.

Each stage j contributes the program of several cuts (`solver.bound.cut`) for its step with one
micro-batch in flight. One cut is at FORWARD_END, the position at which the forward pass has ended
and everything that it saved is on the device (`solver.bound.in_flight`); one or more are after it.
Each stage's schedule satisfies all rows of its program except the byte rows, since the stages share
the memory. Joint rows replace those. There is one for each pass of the rank, in which stage l runs
while o_j other micro-batches of stage j are in flight, and for each position of l:

    sum over j of o_j * saved bytes of j  +  bytes of l at the position  <=  bytes for all stages

The saved bytes of j are those on the device at its FORWARD_END, and are limited to a given range.
The objective is the sum of the stages' lost times. So the optimum bounds every combination of plans
of these stages that fits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphs.graph import Graph
from solver.bound.cut import TIME_ERROR, CutMilp
from solver.bound.in_flight import FORWARD_END, Span, span_graph
from solver.bound.in_flight_cuts import MAX_SEARCH_NODES
from solver.bound.milp import Milp
from solver.bound.storage_graph import StorageGraph
from solver.sizes_deadlines_progress import NEVER, Deadline

OtherCounts = tuple[int, ...]
"""For each stage, how many of its micro-batches are in flight besides the one that runs."""


@dataclass(frozen=True)
class RankBound:
    """A bound, and the solution found.

    lost_s: seconds that the plans lose together at least (inf: none fit together).
    saved_bytes: what each stage saves in the program's solution (None: no solution found).
    kept: for each stage, by position in the graph of `one_in_flight`, the units that the
        MILP's solution keeps on the device (empty for an LP).
    """

    lost_s: float
    saved_bytes: tuple[int, ...] | None
    kept: tuple[Mapping[int, frozenset[int]], ...] = ()


class RankCuts:
    """The joint program of all stages, with one graph for each stage."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        passes: Iterable[tuple[int, OtherCounts]],
        *,
        room_bytes: int,
        positions: Sequence[Collection[int]] = (),
        deadline: Deadline = NEVER,
    ) -> None:
        """Build the program.

        passes: as in `Pipeline.passes`.
        room_bytes: for everything that the nodes of these graphs make.
        positions: for each stage, where its graph of `one_in_flight` is cut besides
            FORWARD_END; if empty, at the fullest position after FORWARD_END.

        Raises OutOfTimeError if the deadline passes meanwhile.
        """
        given_positions = positions or [()] * len(graphs)
        stages = [
            _StageCuts(graph, stage_positions, room_bytes=room_bytes, deadline=deadline)
            for graph, stage_positions in zip(graphs, given_positions, strict=True)
        ]
        self._stages: list[tuple[_StageCuts, int]] = []
        self._baseline_s = math.fsum(graph.baseline_time_s for graph in graphs) or 1.0
        self._scale = float(max((n for s in stages for n in s.folded.unit_bytes), default=0) or 1)
        self._program = Milp(constant=1.0)
        self._saved: list[_ByteExpression] = []
        at_positions: list[list[_ByteExpression]] = []
        for stage, graph in zip(stages, graphs, strict=True):
            share = (graph.baseline_time_s or 1.0) / self._baseline_s
            first_column = self._program.append(stage.program, weight=share)
            self._stages.append((stage, first_column))
            at_positions.append(
                [stage.bytes_at[p].with_column_offset(first_column) for p in stage.positions]
            )
            self._saved.append(stage.bytes_at[stage.forward_end].with_column_offset(first_column))
        # These rows limit the saved bytes of each stage; `bound` sets the limits.
        self._limits = [self._add_row([(1, saved)], self._scale) for saved in self._saved]
        for local, others in _undominated_passes(passes):
            for own in at_positions[local]:
                self._add_row([(1, own), *zip(others, self._saved, strict=True)], room_bytes)

    def bound(
        self,
        least_bytes: Sequence[int],
        most_bytes: Sequence[int],
        *,
        as_milp: bool,
        gap: float = 0.0,
        deadline: Deadline = NEVER,
    ) -> RankBound:
        """Bound the plans in which each stage saves between least_bytes and most_bytes.

        as_milp: solve as a MILP, else as an LP.
        gap: the MILP stops when its bound is within this share of the baseline time of all stages.
        """
        limits = zip(self._limits, self._saved, least_bytes, most_bytes, strict=True)
        for row, saved, least, most in limits:
            row_limits = ((each - saved.held_bytes) / self._scale for each in (least, most))
            self._program.limit(row, *row_limits)
        n_nodes = max(1, min(MAX_SEARCH_NODES, self._program.n_affordable_nodes))
        answer = self._program.solve(
            as_milp=as_milp, gap=gap, node_limit=n_nodes, deadline=deadline
        )
        lost_s = self._baseline_s * max(0.0, answer.bound - 1.0 - TIME_ERROR)
        if answer.values is None:
            return RankBound(lost_s, None)
        shares = answer.values
        saved_bytes = (
            s.held_bytes + round(float(np.dot(shares[s.columns], s.sizes))) for s in self._saved
        )
        kept = (
            stage.kept_units(shares[first_column:])
            for stage, first_column in self._stages
            if as_milp
        )
        return RankBound(lost_s, tuple(saved_bytes), tuple(kept))

    def _add_row(self, parts: Iterable[tuple[int, _ByteExpression]], most_bytes: float) -> int:
        """Add the row: n times the bytes of each part add up to at most most_bytes.

        Returns its index.
        """
        values: dict[int, float] = {}
        for n, part in parts:
            most_bytes -= n * part.held_bytes
            for column, size_bytes in zip(part.columns, part.sizes, strict=True):
                values[column] = values.get(column, 0.0) + n * size_bytes / self._scale
        return self._program.row([*values], [*values.values()], upper=most_bytes / self._scale)


@dataclass(frozen=True)
class _ByteExpression:
    """Bytes as a linear expression: held_bytes plus the sum of sizes times columns."""

    held_bytes: int
    columns: list[int]
    sizes: list[int]

    def with_column_offset(self, offset: int) -> _ByteExpression:
        """The same expression in a program to which the columns were appended from `offset` on."""
        return _ByteExpression(
            self.held_bytes, [offset + column for column in self.columns], self.sizes
        )


class _StageCuts(CutMilp):
    """The rows of one stage's program without its byte rows.

    bytes_at: by position, the bytes on the device without resident tensors, as an expression.
    """

    def __init__(
        self, graph: Graph, positions: Collection[int], *, room_bytes: int, deadline: Deadline
    ) -> None:
        budget_bytes = graph.resident_bytes + room_bytes
        folded = StorageGraph.of(one_in_flight(graph, room_bytes=room_bytes))
        self.forward_end = folded.position[FORWARD_END]
        self.bytes_at: dict[int, _ByteExpression] = {}
        all_positions = sorted(
            {self.forward_end, *(positions or _fullest_position_after(folded, self.forward_end))}
        )
        super().__init__(
            folded, positions=all_positions, budget_bytes=budget_bytes, deadline=deadline
        )
        self.count_equal_columns()

    def _add_bytes(self, p: int, keep: Mapping[int, int]) -> None:
        folded, counted = self.folded, self.counted_bytes(keep, p)
        held_bytes = int(folded.held_bytes[p] + folded.own_bytes[p]) - folded.graph.resident_bytes
        self.bytes_at[p] = _ByteExpression(held_bytes, [*counted], [*counted.values()])


def one_in_flight(graph: Graph, *, room_bytes: int) -> Graph:
    """The span graph (`solver.bound.in_flight`) of one micro-batch with nothing else in flight.

    It has FORWARD_END, and the span excludes nothing that fits into the room.
    """
    budget_bytes = graph.resident_bytes + room_bytes
    unlimited = Span(0.0, 0, budget_bytes)
    return span_graph(graph, unlimited, budget_bytes=budget_bytes, others_bytes=0)


def _fullest_position_after(folded: StorageGraph, forward_end: int) -> Iterator[int]:
    """The position of the backward pass at which the baseline holds most, if any."""
    later = range(forward_end + 1, folded.graph.n_before_optimizer)
    if later:
        yield max(later, key=lambda p: int(folded.baseline_bytes[p]))


def _undominated_passes(passes: Iterable[tuple[int, OtherCounts]]) -> list[tuple[int, OtherCounts]]:
    """The passes whose rows no other pass implies.

    A pass implies another of the same stage if it has at least as many other micro-batches of every
    stage.
    """
    found = sorted(set(passes))
    return [
        (local, others)
        for local, others in found
        if not any(
            local == other
            and others != more
            and all(a <= b for a, b in zip(others, more, strict=True))
            for other, more in found
        )
    ]
