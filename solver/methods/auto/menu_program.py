"""Choose from a menu what is recomputed where, by an integer program over the whole step.

A menu is a set of pairs (node, position right before which it may be recomputed). The program is
that of several cuts (`solver.bound.cut`), with a position for each position on the menu and for
each one at which memory may run short. It has r[n,k] only for entries of the menu, and R[n] only at
the binding position. Most nodes are on the menu at one or two positions, so most x[u,k+1] and
x[u,k] are one column, and a program with all positions of the backward pass takes a MILP solver
seconds.

It proves nothing about schedules that recompute elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from solver.bound import TIME_ERROR, CutMilp, StorageGraph, add_rounded_byte_rows
from solver.methods.auto.from_cuts import fold_simulation
from solver.methods.auto.search import Search
from solver.sizes_deadlines_progress import Deadline

GAP = 2e-4
"""The program is solved to within this share of the baseline's time."""
NODES_TIMES_COLUMNS_SQUARED = 4_000_000
"""Limit on the branch-and-bound nodes of one solve times its columns squared; the root is always
solved. Beyond it HiGHS finds little: ResNet-50 at its minimum budget 43.39 % in 3 s, and no better
in 14 s.
"""
MAX_MENU = 3_000
"""Maximum entries of a menu whose program is built."""
LEAST_VALUE = 1e-6
"""A column with a larger value counts as used."""

Menu = frozenset[tuple[int, int]]
"""(node, position right before which it may be recomputed)."""


def menu_program(
    search: Search, menu: Menu, *, base: int, allowance_bytes: Mapping[int, int] | None = None
) -> MenuMilp:
    """The program of the menu, with rounded byte rows.

    base: the binding position.

    Raises OutOfTimeError.
    """
    folded, budget_bytes = search.folded, search.budget_bytes
    program = MenuMilp(
        folded,
        menu=menu,
        base=base,
        positions=_positions(folded, menu, base=base, budget_bytes=budget_bytes),
        budget_bytes=budget_bytes,
        allowance_bytes=allowance_bytes,
        deadline=search.deadline,
    )
    add_rounded_byte_rows(program)
    return program


def _positions(folded: StorageGraph, menu: Menu, *, base: int, budget_bytes: int) -> list[int]:
    """Where something on the menu is recomputed, and where the baseline exceeds the budget."""
    over_budget = {p for p in range(folded.n_nodes) if folded.baseline_bytes[p] > budget_bytes}
    menu_positions = {q for _, p in menu for q in (p - 1, p) if q >= 0}
    first = min(folded.n_forward, base)
    return sorted({p for p in over_budget | menu_positions if p >= first} | {base})


def recomputed_by_best(search: Search) -> Menu:
    """The menu of what the best schedule recomputes; empty if there is none."""
    if search.best is None:
        return Menu()
    return fold_simulation(search.folded, search.best[0]).recomputed


class MenuMilp(CutMilp):
    """The program that the module describes."""

    def __init__(
        self, folded: StorageGraph, *, menu: Menu, base: int, positions: Sequence[int], **rest: Any
    ) -> None:
        """Build the program.

        base: the position among `positions` that binds.
        rest: the other arguments of CutMilp.
        """
        self._menu = menu
        self._base = base
        super().__init__(folded, positions=positions, **rest)

    def _candidates(self) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
        folded = self.folded
        allowed: list[set[int]] = [set() for _ in self.positions]
        for n, p in self._menu:
            k = self._last_position_before(p)
            if n < self.positions[k]:
                allowed[k].add(n)
        read_later: set[int] = set()
        units = []
        for p, nodes in zip(reversed(self.positions), reversed(allowed), strict=True):
            self._deadline.check()
            read_later.update(u for n in nodes for u in folded.reads[n])
            n_run = min(p, folded.n_forward)
            units.append(
                [
                    u
                    for u, uses in enumerate(folded.uses)
                    if folded.maker[u] < n_run and uses and (uses[-1] >= p or u in read_later)
                ]
            )
        yield from zip(reversed(units), allowed, strict=True)

    def _add_totals(self) -> None:
        k = self.positions.index(self._base)
        parts: dict[int, list[int]] = {}
        for recompute in self.recompute[k:]:
            for n, column in recompute.items():
                parts.setdefault(n, []).append(column)
        self._add_total(k, parts)

    def entries(self, values: npt.NDArray[np.float64]) -> Menu:
        """The entries of the menu that a solution with these values recomputes."""
        return Menu(
            (n, p)
            for n, p in self._menu
            if n in self.recompute[self._last_position_before(p)]
            and values[self.recompute[self._last_position_before(p)][n]] > LEAST_VALUE
        )

    def _last_position_before(self, p: int) -> int:
        """The index of the last of the program's positions before p."""
        return max(0, bisect_left(self.positions, p) - 1)


def kept_by_best(
    cuts: CutMilp, *, below: float, deadline: Deadline
) -> dict[int, frozenset[int]] | None:
    """By position, the units that the best solution found holds.

    Returns None if no solution is found that loses less than `below`, as a share of the baseline's
    time.
    """
    program = cuts.program
    answer = program.solve(
        as_milp=True,
        gap=GAP,
        node_limit=max(1, NODES_TIMES_COLUMNS_SQUARED // max(1, cuts.n_columns) ** 2),
        deadline=deadline,
    )
    values = answer.values
    if values is None or np.dot(program.cost, values) >= below - TIME_ERROR:
        return None
    return cuts.kept_units(values)
