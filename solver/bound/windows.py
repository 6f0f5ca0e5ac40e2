"""Several cuts with the rows of a single cut for each window between a few of them.

The program of several cuts (`solver.bound.cut`) has, for each position, columns R: what is
recomputed at least once between there and the end. Near the minimum budget the same stretch is
recomputed once for each level of the backward pass, and in the relaxation half a recomputation
before each level does as well as a whole one. The program here excludes that. A few of the
positions are marks, and for any two marks j and l (l may be the end) there is a column W[n,j,l]: n
is recomputed at least once from mark j to mark l. For every mark s between the two

                W[n,j,s], W[n,s,l] <= W[n,j,l] <= W[n,j,s] + W[n,s,l]

and between neighbouring marks the same with the r of all positions between them. The rows of a
single cut hold for each window:

                x[u,j] + W[maker(u),j,l] >= 1           for each unit u read between the two
                x[v,j] + W[maker(v),j,l] >= W[n,j,l]    for each unit v that n reads.

**Why it bounds every legal schedule.** As in `solver.bound.cut`, with "before mark l" for "before
the end": what a node between the two reads was on the device at mark j, or was recomputed since. Of
the rows over s, only those with s = j + 1 and s = l - 1 are added.

Small units are left out (`without_small`). That is a relaxation, and halves the columns. As an LP
with rounded byte rows (`solver.bound.rounded_byte_rows`) the program takes 1.2 s and proves an
overhead of 55.7 %, where several cuts as a MILP prove 35.0 % in fifteen seconds (the U-Net of the
examples at its minimum budget).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from solver.bound.cut import CutMilp
from solver.bound.rounded_byte_rows import add_rounded_byte_rows
from solver.bound.storage_graph import StorageGraph
from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError

SMALL_SHARE = 0.002
"""Units smaller than this share of the budget without resident bytes are left out."""
MAX_MARKS = 12
MAX_CELLS, MAX_WINDOW_CELLS = 5_000, 13_500
"""At most so many forward nodes times positions, and times windows: about the number of columns."""

Columns = Mapping[int, int]
"""For each node, the column that says whether it is recomputed in some window."""


class WindowCuts(CutMilp):
    """The program that the module describes."""

    def __init__(self, folded: StorageGraph, *, marks: Sequence[int], **rest: Any) -> None:
        """Build the program.

        marks: some of the positions.
        rest: the other arguments of CutMilp.
        """
        self._marks = tuple(marks)
        super().__init__(folded, **rest)

    def _add_totals(self) -> None:
        starts = [self.positions.index(mark) for mark in self._marks]
        stops = [*starts[1:], len(self.positions)]
        windows: dict[tuple[int, int], Columns] = {}
        for j, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            self._deadline.check()
            windows[j, j + 1] = self._add_window(j, j + 1, [self.recompute[start:stop]])
        for length in range(2, len(starts) + 1):
            for j in range(len(starts) + 1 - length):
                self._deadline.check()
                last = j + length
                splits = [
                    (windows[j, s], windows[s, last]) for s in dict.fromkeys((j + 1, last - 1))
                ]
                windows[j, last] = self._add_window(j, last, splits)

    def _add_window(self, j: int, last: int, splits: Iterable[Sequence[Columns]]) -> Columns:
        """Add W from mark j to mark `last`, with its rows; returns its column by node.

        splits: ways to divide the window, each with the columns of its parts.
        """
        p, folded, program = self._marks[j], self.folded, self.program
        end = self._marks[last] if last < len(self._marks) else folded.n_nodes + 1
        keep = self.keep[self.positions.index(p)]
        total: dict[int, int] = {}
        for parts in splits:
            for n in sorted(set().union(*parts)):
                columns = list(dict.fromkeys(part[n] for part in parts if n in part))
                if n >= p:  # not computed yet at mark j
                    continue
                if n not in total and len(columns) == 1:  # W equals its only part
                    total[n] = columns[0]
                elif columns != [total.get(n)]:
                    if n not in total:
                        total[n] = program.variable(integer=False)
                    values = [1.0] * len(columns)
                    program.row([*columns, total[n]], [*values, -1.0], lower=0.0)
                    for column in columns:
                        program.row([total[n], column], [1.0, -1.0], lower=0.0)
        due_units = (u for u in keep if any(p < use < end for use in folded.uses[u]))
        self._cover_all(due_units, p, keep, total)
        return total


def lost_share_by_windows(
    folded: StorageGraph,
    *,
    budget_bytes: int,
    base: int | None = None,
    deadline: Deadline = NEVER,
) -> float:
    """The overhead, as a share of the baseline's time, that the program's LP proves (0: nothing).

    base: a position that becomes a mark, such as that of the strongest single cut.
    """
    coarse = large_units_only(folded, budget_bytes)
    positions, marks = _positions_and_marks(coarse, budget_bytes=budget_bytes, base=base)
    if len(marks) < 2:
        return 0.0
    try:
        program = WindowCuts(
            coarse,
            positions=positions,
            marks=marks,
            budget_bytes=budget_bytes,
            deadline=deadline,
        )
        add_rounded_byte_rows(program)
    except OutOfTimeError:
        return 0.0
    return program.to_cuts(program.program.solve(as_milp=False, deadline=deadline)).lost_share


def large_units_only(folded: StorageGraph, budget_bytes: int) -> StorageGraph:
    """The step without units that are small relative to the budget; this halves the columns."""
    small_bytes = int(SMALL_SHARE * (budget_bytes - folded.graph.resident_bytes))
    return without_small(folded, small_bytes=small_bytes)


def without_small(folded: StorageGraph, *, small_bytes: int) -> StorageGraph:
    """The step as if small units that can be recomputed had no bytes and were always there.

    Every schedule of the step is also one of the result, so a bound on the result bounds the step.
    small_bytes: units of fewer bytes are small.
    """
    small = {
        u
        for u, n in enumerate(folded.maker)
        if folded.unit_bytes[u] < small_bytes and n < folded.n_forward and folded.recomputable[n]
    }
    return replace(
        folded,
        reads=tuple(tuple(u for u in read if u not in small) for read in folded.reads),
        unit_bytes=tuple(0 if u in small else b for u, b in enumerate(folded.unit_bytes)),
        uses=tuple(() if u in small else uses for u, uses in enumerate(folded.uses)),
    )


def _positions_and_marks(
    folded: StorageGraph, *, budget_bytes: int, base: int | None
) -> tuple[list[int], list[int]]:
    """Choose the positions and marks: those where what any schedule needs leaves the least room."""
    over_budget = [
        p
        for p in range(folded.n_forward, folded.n_nodes)
        if folded.baseline_bytes[p] > budget_bytes
    ]
    tightest = sorted(over_budget, key=lambda p: (-int(folded.least_bytes[p]), p))
    base_position = [] if base is None else [base]
    makes = folded.makes[: folded.n_forward]
    n_nodes = max(1, sum(any(folded.unit_bytes[u] for u in made) for made in makes))
    n_marks = next(
        m for m in range(MAX_MARKS, -1, -1) if n_nodes * m * (m + 1) <= 2 * MAX_WINDOW_CELLS
    )
    marks, other_positions = (
        spread_out([*base_position, *tightest], n, distance=len(over_budget) // max(1, 2 * n))
        for n in (n_marks, min(len(over_budget), MAX_CELLS // n_nodes))
    )
    return sorted({*marks, *other_positions}), sorted(marks)


def spread_out(candidates: Iterable[int], n_most: int, *, distance: int) -> list[int]:
    """Up to n_most of the candidates that are more than `distance` apart, the first ones first."""
    chosen: list[int] = []
    for p in candidates:
        if len(chosen) < n_most and all(abs(p - q) > distance for q in chosen):
            chosen.append(p)
    return chosen
