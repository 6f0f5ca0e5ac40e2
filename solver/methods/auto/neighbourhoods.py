"""Large neighbourhood search: free what is recomputed before some positions, fix the rest.

Near the least budget most of the time is lost in a few places: on DenseNet-121 two thirds of it
while the first of four dense blocks runs backward. Eviction and cuts each find one way through such
a place, and recombination only joins ways that were found. Here a window of positions is solved
anew: all nodes that matter there may be recomputed before each of its positions, what the best
schedule recomputes near it is free too, and the rest of what that recomputes stays fixed. The
program is that of `solver.methods.auto.menu_program` with the rows of
`solver.methods.auto.recompute_rows`, so what it finds mostly fits. Windows begin where the best
schedule recomputes; the one that loses the most is next, until some in a row give nothing.

In the manner of Shaw 1998, "Using constraint programming and local search methods to solve vehicle
routing problems". Optimal for the window where the program is solved to its end; proves nothing.
Steps with thousands of recomputed nodes are left alone: their programs are too large.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from solver.bound import StorageGraph, binding_cut, large_units_only
from solver.methods.auto.menu_program import MAX_MENU, Menu, menu_program, recomputed_by_best
from solver.methods.auto.recompute_rows import add_recompute_rows
from solver.methods.auto.search import Search
from solver.methods.proposal import Proposal
from solver.schedule import Schedule

MAX_ENTRIES = 500
"""Nodes times positions of a window."""
N_NEAR = 2
"""Places before and after the window at which what is recomputed may be left out."""
MAX_WORK = 1_000_000_000
"""Of all windows: the columns of each program squared, one to two minutes."""
MAX_IN_VAIN = 4
"""Windows in a row that give nothing, after which the search ends."""
WORTH_GAP = 0.05
"""Of the baseline's time: a smaller gap is not worth the time."""
WORTH_A_WINDOW = 2e-3
"""Of the baseline's time: windows that lose less are not solved."""


def refine(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    starts: Sequence[Schedule],
    proven_s: float,
) -> Proposal:
    """A schedule at least as fast as those of `starts` that are legal and within the budget.

    proven_s: no schedule is faster. Nothing is tried within WORTH_GAP of it.
    """
    search = Search(StorageGraph.of(graph), budget_bytes=budget_bytes, time_limit_s=time_limit_s)
    with search:
        for schedule in starts:
            search.offer(schedule)
        search.prove(proven_s / (graph.baseline_time_s or 1.0) - 1.0)
        if WORTH_GAP <= search.gap < math.inf:
            binding = binding_cut(
                search.folded, budget_bytes=budget_bytes, deadline=search.deadline
            )
            if binding.ranked:
                search_neighbourhoods(search, base=binding.ranked[0][0])
    return search.proposal()


def search_neighbourhoods(search: Search, *, base: int) -> None:
    """Offer the best schedule of one window after the other; base: the position that binds."""
    steps, work, in_vain, tried = _Steps(search), 0, 0, set[_Window]()
    while not search.close and work <= MAX_WORK and in_vain < MAX_IN_VAIN:
        best = recomputed_by_best(search)
        if len(best) + MAX_ENTRIES > MAX_MENU:
            return
        windows = [each for each in steps.windows(best) if each not in tried]
        window = max(windows, key=lambda each: (each.lost_share, -each.first), default=None)
        if window is None or window.lost_share < WORTH_A_WINDOW:
            return
        tried.add(window)
        before = search.best_share
        work += _offer_best(search, window, best, base)
        in_vain = 0 if search.best_share < before else in_vain + 1


@dataclass(frozen=True)
class _Window:
    """Positions from first to last. menu: what may be recomputed there. recomputed: what the best
    schedule recomputes there, which loses lost_share of the baseline's time.
    """

    first: int
    last: int
    menu: Menu
    recomputed: Menu
    lost_share: float


def _offer_best(search: Search, window: _Window, best: Menu, base: int) -> int:
    """Returns the work: the columns of the program squared."""
    program = menu_program(search, best | window.menu, base=base)
    add_recompute_rows(program, deadline=search.deadline)
    places = sorted({p for _, p in best})
    before = [p for p in places if p < window.first][-N_NEAR:]
    after = [p for p in places if p > window.last][:N_NEAR]
    first, last = min([*before, window.first]), max([*after, window.last])
    program.fix((n, p) for n, p in best if not first <= p <= last)
    kept = program.solve(below=search.best_share)
    if kept is not None:
        found = search.offer_cuts(kept)
        if found is not None:
            search.offer_improved(found.schedule)
    return program.n_columns**2


class _Steps:
    """What matters at each position, of units that are not small beside the budget."""

    def __init__(self, search: Search) -> None:
        folded = large_units_only(search.folded, search.budget_bytes)
        baseline_s = folded.graph.baseline_time_s or 1.0
        self._time_share = [time_s / baseline_s for time_s in folded.time_s]
        self._end = folded.n_nodes
        self._inputs = [
            {folded.maker[u] for u in read if folded.maker[u] < folded.n_forward}
            for read in folded.reads
        ]
        self._may = search.folded.recomputable

    def windows(self, best: Menu) -> Iterator[_Window]:
        """One from each place at which the best schedule recomputes something, as far as it goes
        with MAX_ENTRIES.
        """
        by_place: dict[int, set[int]] = defaultdict(set)
        for n, p in best:
            by_place[p].add(n)
        for first in sorted(by_place):
            positions, wanted, last, menu = list[int](), set[int](), first, Menu()
            for p in range(first, self._end + 1):
                read = self._inputs[p] if p < self._end else set[int]()
                if not read and p not in by_place:
                    continue
                positions.append(p)
                wanted |= read | by_place.get(p, set())
                nodes = self._nodes(wanted)
                if menu and len(positions) * len(nodes) > MAX_ENTRIES:
                    break
                last, menu = p, Menu((n, q) for q in positions for n in nodes)
            recomputed = Menu((n, p) for p in range(first, last + 1) for n in by_place.get(p, ()))
            lost_share = sum(self._time_share[n] for n, _ in sorted(recomputed))
            yield _Window(first, last, menu, recomputed, lost_share)

    def _nodes(self, wanted: set[int]) -> list[int]:
        """Those wanted and what they read, no earlier than the earliest of them."""
        earliest = min(wanted)
        found = wanted.union(*(self._inputs[n] for n in wanted))
        return sorted(n for n in found if n >= earliest and self._may[n])
