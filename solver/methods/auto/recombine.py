"""The best schedule that can be put together from the recomputation of schedules seen before.

Each schedule that the search has simulated, whether it fits or not, says which nodes it recomputed
and right before which position (the first computation of a node). All of these together are a menu.
With a position for each place on it and for each one at which memory may run short, the program is
that of several cuts (`solver.bound.cut`), with r[n,k] only for what is on the menu, and R[n] only
at the position that binds. As most nodes are on the menu at one or two places, most x[u,k+1] and
x[u,k] are one column, and all positions of the backward pass fit into a program that a MILP solver
takes seconds for. Bytes that the recomputation itself takes between two positions are not in the
rows: where the simulator sees an overflow, the position gets an allowance and the program is solved
again.

The first menu is what the best schedule recomputes and what the one next to it does; the next ones
are GROWTH times as long each, until all are on it. A short program is
solved to its end, and what it finds is where the next begins: on DenseNet-121 at 10 % the whole
menu alone, which stops at a count of nodes, gave 26.7 % in twice the time of the two first, which
give 26.5.

It proves nothing about schedules that recompute elsewhere. It is never worse than the schedules
that made the menu where the program is solved to the end, and often much better: evictions and cuts
each get some part of the step right.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from solver.bound import CutMilp, StorageGraph
from solver.methods.auto.from_cuts import FoldedSimulation, fold_simulation
from solver.methods.auto.search import Search

GAP = 2e-4
"""The program is solved to within this share of the baseline's time."""
NODES_TIMES_COLUMNS = 100_000
"""Branch-and-bound nodes times columns of one solve."""
MAX_MENU = 3_000
"""The program has three to four columns for each entry. Nothing else bounds the work at the root
node, which HiGHS does not count: 34 of 36 processor seconds on ResNet-50 with 834 entries.
"""
MAX_ROUNDS = 4
"""Times that overflowing positions get an allowance."""

GROWTH = 2
"""How many times as long the next menu is."""

Menu = frozenset[tuple[int, int]]
"""(node, position right before which it may be recomputed)."""


def recombine(search: Search, *, base: int) -> None:
    """Offer the best schedules from longer and longer menus; base: the position that binds.

    Ends where the next is too long for a program that can be solved.
    """
    left, length = list(search.menus), 0
    while not search.close:
        best: Menu = frozenset()  # what the best schedule recomputes
        if search.best is not None:
            best = fold_simulation(search.folded, search.best[0]).recomputed
        left = [each for each in left if not each <= best]
        menu = _next_menu(best, left, least_length=GROWTH * length)
        if not left or len(menu) > MAX_MENU:
            return
        left, length = [each for each in left if not each <= menu], len(menu)
        _offer_best(search, menu, base)


def _next_menu(best: Menu, left: Sequence[Menu], *, least_length: int) -> Menu:
    """What the best schedule recomputes, and of the schedules that are left those that recompute
    the least besides.
    """
    menu = best
    for each in sorted(left, key=lambda each: len(each - best)):
        menu |= each
        if len(menu) >= least_length:
            break
    return menu


def _offer_best(search: Search, menu: Menu, base: int) -> None:
    """Offer the best schedule from the menu, with allowances where it overflows."""
    folded, budget_bytes = search.folded, search.budget_bytes
    positions = _positions(folded, menu, base=base, budget_bytes=budget_bytes)
    allowance_bytes: dict[int, int] = {}
    before: FoldedSimulation | None = None
    for _ in range(MAX_ROUNDS):
        program = MenuMilp(
            folded,
            menu=menu,
            base=base,
            positions=positions,
            budget_bytes=budget_bytes,
            allowance_bytes=allowance_bytes,
            deadline=search.deadline,
        )
        if search.done:
            return
        guide = program.solve(below=search.best_share)
        if guide is None:
            return
        found = search.offer_cuts(guide)
        if found is None or found.simulation.peak_bytes <= budget_bytes:
            return
        if before is not None and found.stage_bytes == before.stage_bytes:
            return
        before = found
        for p, live_bytes in enumerate(found.stage_bytes):
            if live_bytes > budget_bytes:
                # What was recomputed before p lies between two of the program's positions.
                k = min(bisect_left(positions, p), len(positions) - 1)
                for q in positions[max(0, k - 1) : k + 1]:
                    allowance_bytes[q] = allowance_bytes.get(q, 0) + live_bytes - budget_bytes


def _positions(folded: StorageGraph, menu: Menu, *, base: int, budget_bytes: int) -> list[int]:
    """Where something on the menu is recomputed, and where the baseline would overflow."""
    full = {p for p in range(folded.n_nodes) if folded.baseline_bytes[p] > budget_bytes}
    places = {q for _, p in menu for q in (p - 1, p) if q >= 0}
    first = min(folded.n_forward, base)
    return sorted({p for p in full | places if p >= first} | {base})


class MenuMilp(CutMilp):
    """The program of the module."""

    def __init__(
        self, folded: StorageGraph, *, menu: Menu, base: int, positions: Sequence[int], **rest: Any
    ) -> None:
        """base: of the positions, the one that binds. The rest is as for CutMilp."""
        self._menu = menu
        self._base = base
        super().__init__(folded, positions=positions, **rest)

    def _candidates(self) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
        folded = self.folded
        allowed: list[set[int]] = [set() for _ in self.positions]
        for n, p in self._menu:
            k = max(0, bisect_left(self.positions, p) - 1)
            if n < self.positions[k]:
                allowed[k].add(n)
        read_later: set[int] = set()
        units = []
        for p, nodes in zip(reversed(self.positions), reversed(allowed), strict=True):
            self._deadline.check()
            read_later.update(u for n in nodes for u in folded.reads[n])
            made = min(p, folded.n_forward)
            units.append(
                [
                    u
                    for u, uses in enumerate(folded.uses)
                    if folded.maker[u] < made and uses and (uses[-1] >= p or u in read_later)
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

    def solve(self, *, below: float) -> dict[int, frozenset[int]] | None:
        """By position, the units that the best solution found holds; None: none found.

        below: the time lost must be less, as a share of the baseline's; it prunes the search.
        """
        program = self.program
        if math.isfinite(below):
            program.row(list(range(len(program.cost))), program.cost, upper=below - GAP)
        answer = program.solve(
            whole=True,
            gap=GAP,
            node_limit=max(1, NODES_TIMES_COLUMNS // max(1, len(program.cost))),
            deadline=self._deadline,
        )
        values = answer.values
        if values is None:
            return None
        return {
            p: frozenset(u for u, column in keep.items() if values[column] > 0.5)
            for p, keep in zip(self.positions, self.keep, strict=True)
        }
