"""Cuts of several stages that share a rank's memory: what their plans lose together at least.

Each stage j has the program of several cuts (`solver.bound.cut`) at some positions of its step with
one micro-batch in flight: TURN, at which the forward pass has ended and what it saves is on the
device (`solver.bound.in_flight`), and one or more after that. All rows of these programs hold
for its schedule by itself, but for those of bytes. In their place, for each pass of the rank, in
which o_j other micro-batches of stage j are in flight while stage l runs, and for each position

    sum over j of o_j * saved bytes of j  +  bytes of l at the position  <=  bytes for all stages

where the saved bytes of j are what it has on the device at TURN, and lie between given limits. The
costs add up. So the solution bounds all plans of these stages that fit together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphs.graph import Graph
from solver.bound.cut import NODES_TIMES_COLUMNS_SQUARED, TIME_ERROR, CutMilp
from solver.bound.in_flight import TURN, Span, span_graph
from solver.bound.milp import Floats, Milp
from solver.bound.storage_graph import StorageGraph
from solver.sizes_deadlines_progress import NEVER, Deadline

N_SEARCHED = 300
"""Branch-and-bound nodes of one MILP at most."""

Others = tuple[int, ...]
"""By stage, how many of its micro-batches are in flight beside the one that runs."""


@dataclass(frozen=True)
class RankBound:
    """lost_s: what all plans lose at least (inf: none fit together).
    saved_bytes: of each stage in the program's solution (None: it found none).
    kept: of each stage, by position in the graph of `alone`, the units that the MILP's solution
        holds.
    """

    lost_s: float
    saved_bytes: tuple[int, ...] | None
    kept: tuple[Mapping[int, frozenset[int]], ...] = ()


class RankCuts:
    """The program for one graph of each stage."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        passes: Iterable[tuple[int, Others]],
        *,
        room_bytes: int,
        positions: Sequence[Collection[int]] = (),
        deadline: Deadline = NEVER,
    ) -> None:
        """passes: as of `Pipeline.passes`. room_bytes: for all that these graphs make.
        positions: of each stage beside TURN, in the graph of `alone`; without any, the fullest.

        Raises OutOfTimeError while it is built.
        """
        given = positions or [()] * len(graphs)
        stages = [
            _StageCuts(graph, of_stage, room_bytes=room_bytes, deadline=deadline)
            for graph, of_stage in zip(graphs, given, strict=True)
        ]
        self._stages: list[tuple[_StageCuts, int]] = []
        self._baseline_s = math.fsum(graph.baseline_time_s for graph in graphs) or 1.0
        self._scale = float(max((n for s in stages for n in s.folded.unit_bytes), default=0) or 1)
        self._program = Milp(constant=1.0)
        self._saved: list[_Bytes] = []
        at_positions: list[list[_Bytes]] = []
        for stage, graph in zip(stages, graphs, strict=True):
            share = (graph.baseline_time_s or 1.0) / self._baseline_s
            first = self._program.append(stage.program, weight=share)
            self._stages.append((stage, first))
            at_positions.append([stage.bytes_at[p].moved(first) for p in stage.positions])
            self._saved.append(stage.bytes_at[stage.turn].moved(first))
        self._limits = [self._row([(1, saved)], self._scale) for saved in self._saved]
        for local, others in _most(passes):
            for own in at_positions[local]:
                self._row([(1, own), *zip(others, self._saved, strict=True)], room_bytes)

    def bound(
        self,
        least_bytes: Sequence[int],
        most_bytes: Sequence[int],
        *,
        whole: bool,
        gap: float = 0.0,
        deadline: Deadline = NEVER,
    ) -> RankBound:
        """Of the plans whose stages save between these bytes; as LP, or `whole` as MILP.

        gap: the MILP stops when its bound is within this share of the time of all stages.
        """
        limits = zip(self._limits, self._saved, least_bytes, most_bytes, strict=True)
        for row, saved, least, most in limits:
            of_row = ((each - saved.held_bytes) / self._scale for each in (least, most))
            self._program.limit(row, *of_row)
        affordable = NODES_TIMES_COLUMNS_SQUARED // max(1, len(self._program.cost)) ** 2
        n_nodes = max(1, min(N_SEARCHED, affordable))
        answer = self._program.solve(whole=whole, gap=gap, node_limit=n_nodes, deadline=deadline)
        lost_s = self._baseline_s * max(0.0, answer.bound - 1.0 - TIME_ERROR)
        if answer.values is None:
            return RankBound(lost_s, None)
        shares = answer.values
        found = (
            s.held_bytes + round(float(np.dot(shares[s.columns], s.sizes))) for s in self._saved
        )
        kept = (stage.kept(shares[first:]) for stage, first in self._stages if whole)
        return RankBound(lost_s, tuple(found), tuple(kept))

    def _row(self, parts: Iterable[tuple[int, _Bytes]], most_bytes: float) -> int:
        """So many times these bytes are at most those. Returns the number of the row."""
        values: dict[int, float] = {}
        for n, part in parts:
            most_bytes -= n * part.held_bytes
            for column, size_bytes in zip(part.columns, part.sizes, strict=True):
                values[column] = values.get(column, 0.0) + n * size_bytes / self._scale
        return self._program.row([*values], [*values.values()], upper=most_bytes / self._scale)


@dataclass(frozen=True)
class _Bytes:
    """held_bytes, and sizes times columns."""

    held_bytes: int
    columns: list[int]
    sizes: list[int]

    def moved(self, first: int) -> _Bytes:
        """Where the columns begin at this one."""
        return _Bytes(self.held_bytes, [first + column for column in self.columns], self.sizes)


class _StageCuts(CutMilp):
    """A stage's rows, but for those of bytes.

    bytes_at: by position, what is on the device beside resident tensors.
    """

    def __init__(
        self, graph: Graph, positions: Collection[int], *, room_bytes: int, deadline: Deadline
    ) -> None:
        budget_bytes = graph.resident_bytes + room_bytes
        folded = StorageGraph.of(alone(graph, room_bytes=room_bytes))
        self.turn = folded.position[TURN]
        self.bytes_at: dict[int, _Bytes] = {}
        together = sorted({self.turn, *(positions or _fullest_after(folded, self.turn))})
        super().__init__(folded, positions=together, budget_bytes=budget_bytes, deadline=deadline)
        self.count_alike()

    def kept(self, shares: Floats) -> dict[int, frozenset[int]]:
        """By position, the units that the solution holds."""
        found = zip(self.positions, self.keep, strict=True)
        return {p: frozenset(u for u in keep if shares[keep[u]] > 0.5) for p, keep in found}

    def _add_bytes(self, p: int, keep: Mapping[int, int]) -> None:
        folded, counted = self.folded, self.counted(keep, p)
        held_bytes = int(folded.held_bytes[p] + folded.own_bytes[p]) - folded.graph.resident_bytes
        sizes = [folded.unit_bytes[u] for u in counted]
        self.bytes_at[p] = _Bytes(held_bytes, [keep[u] for u in counted], sizes)


def alone(graph: Graph, *, room_bytes: int) -> Graph:
    """The step with one micro-batch in flight and TURN, beside nothing, with room for all."""
    budget_bytes = graph.resident_bytes + room_bytes
    unlimited = Span(0.0, 0, budget_bytes)
    return span_graph(graph, unlimited, budget_bytes=budget_bytes, others_bytes=0)


def _fullest_after(folded: StorageGraph, turn: int) -> Iterator[int]:
    """The fullest position after TURN and before the optimizer."""
    later = range(turn + 1, folded.graph.n_before_optimizer)
    if later:
        yield max(later, key=lambda p: int(folded.baseline_bytes[p]))


def _most(passes: Iterable[tuple[int, Others]]) -> list[tuple[int, Others]]:
    """Those beside which no other pass of the same stage has as many of each."""
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
