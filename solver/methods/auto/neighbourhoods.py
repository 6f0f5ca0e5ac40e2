"""Large neighbourhood search: plan one stretch of the step after the other anew, the rest fixed.

Near the least budget most of the time is lost in a few places: on DenseNet-121 two thirds of it
while the first of four dense blocks runs backward. Eviction and cuts each find one way through such
a place, and recombination only joins ways that were found. Here a stretch of positions is planned
anew by an integer program (`solver.methods.auto.stretch_program`). At the positions in its middle
all nodes that matter there may be recomputed; at those where the best schedule recomputes before
and after, only what it recomputes there.

A stretch begins where the best schedule recomputes. Short ones are solved in hundredths of a second
and come first; where one gives nothing, the places in its first half get one twice as large, four
times at most. Of all, the one whose middle loses the most is next, large ones counting less. Where
one gives something, the places begin again with a smaller size.

In the manner of Shaw 1998, "Using constraint programming and local search methods to solve vehicle
routing problems". Where it ends by itself, no stretch of the largest size can be improved as far as
the root of branch and bound shows; it proves nothing about the whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from graphs.graph import Graph
from solver.bound import StorageGraph, large_units_only
from solver.methods.auto.runs import Runs, live_bytes
from solver.methods.auto.search import Search
from solver.methods.auto.stretch_program import Stretch, StretchMilp
from solver.methods.proposal import Proposal
from solver.schedule import Schedule, Simulation

ENTRIES = (150, 300, 600, 1200)
"""Nodes times places of a stretch's middle, by its size."""
N_NEAR = (0, 4, 8, 12)
"""Places before and after the middle at which what is recomputed may be left out, by its size."""
WORSE_BY_SIZE = 1.5
"""Powers of two that a size must lose more than the one before it to come first."""
MAX_WORK = 500_000_000
"""Of all programs: the columns of each squared, about a minute."""
MAX_IN_VAIN = 100_000_000
"""Of programs in a row that give nothing, after which the search ends."""
WORTH_GAP = 0.05
"""Of the baseline's time: a smaller gap is not worth the time."""
WORTH_A_STRETCH = 2e-3
"""Of the baseline's time: middles that lose less are not solved."""


def refine(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    start: Schedule,
    proven_s: float,
) -> Proposal:
    """A schedule at least as fast as this one, which is legal and within the budget.

    proven_s: no schedule is faster. Nothing is tried within WORTH_GAP of it.
    """
    search = Search(StorageGraph.of(graph), budget_bytes=budget_bytes, time_limit_s=time_limit_s)
    with search:
        search.offer(start)
        search.prove(proven_s / (graph.baseline_time_s or 1.0) - 1.0)
        if WORTH_GAP <= search.gap < math.inf:
            search_neighbourhoods(search)
    return search.proposal()


def search_neighbourhoods(search: Search) -> None:
    """Offer what each stretch of the best schedule can be made; see the module."""
    work, in_vain = 0, 0
    sizes: dict[int, int] = defaultdict(int)
    large = large_units_only(search.folded, search.budget_bytes)
    plan: _Plan | None = None
    while not search.close and search.best and work <= MAX_WORK and in_vain <= MAX_IN_VAIN:
        if plan is None or plan.schedule is not search.best[0]:
            plan = _Plan(search.folded, large, *search.best)
        middle = plan.next_middle(sizes)
        if middle is None:
            return
        cost = _offer_planned_anew(search, plan, middle)
        work, in_vain = work + cost, in_vain + cost
        size = sizes[middle.first]
        if plan.schedule is search.best[0]:
            for p in range(middle.first, (middle.first + middle.last) // 2 + 1):
                sizes[p] = max(sizes[p], size + 1)
        else:
            in_vain, stretch = 0, plan.around(middle)
            for p in range(stretch.first, stretch.last + 1):
                sizes[p] = min(sizes[p], max(0, size - 1))


def _offer_planned_anew(search: Search, plan: _Plan, middle: _Middle) -> int:
    """Returns the work: the columns of the program squared."""
    stretch = plan.around(middle)
    program = StretchMilp(
        search.folded,
        stretch,
        runs=plan.runs,
        live_bytes=plan.live_bytes,
        budget_bytes=search.budget_bytes,
        deadline=search.deadline,
    )
    lost_share = plan.lost_share(stretch.first, stretch.last)
    found = program.schedule(plan.runs, below=lost_share, deadline=search.deadline)
    if found is not None and search.is_faster(found.order):
        search.offer_improved(found)
    return program.n_columns**2


@dataclass(frozen=True)
class _Middle:
    """Positions from first to last. places: those of them at which nodes may be recomputed."""

    first: int
    last: int
    places: tuple[int, ...]
    nodes: tuple[int, ...]
    size: int


class _Plan:
    """A schedule, and by position what it recomputes right before it."""

    def __init__(
        self,
        folded: StorageGraph,
        large: StorageGraph,
        schedule: Schedule,
        simulation: Simulation,
    ) -> None:
        """large: without units that are small beside the budget."""
        self.schedule = schedule
        self.runs = Runs(folded, schedule.order)
        self.live_bytes = live_bytes(schedule, simulation)
        self._large = large
        baseline_s = folded.graph.baseline_time_s or 1.0
        self._time_share = [time_s / baseline_s for time_s in folded.time_s]
        self._recomputed: dict[int, list[int]] = defaultdict(list)
        self._middles: dict[tuple[int, int], _Middle] = {}
        n_first_runs = 0
        for i, n in enumerate(self.runs.nodes):
            if self.runs.first[n] == i:
                n_first_runs += 1
            elif n_first_runs < folded.n_nodes:
                self._recomputed[n_first_runs].append(n)

    @cached_property
    def places(self) -> list[int]:
        """Positions, but the end, before which something is recomputed."""
        return sorted(self._recomputed)

    def lost_share(self, first: int, last: int) -> float:
        """Time that is lost from one position to another, as a share of the baseline's."""
        return sum(
            self._time_share[n] for p in range(first, last + 1) for n in self._recomputed.get(p, ())
        )

    def next_middle(self, sizes: dict[int, int]) -> _Middle | None:
        """sizes: by place."""
        middles = (self._middle(p, sizes[p]) for p in self.places if sizes[p] < len(ENTRIES))
        worth = ((self.lost_share(each.first, each.last), each) for each in middles)
        ranked = (
            (lost_share / 2 ** (WORSE_BY_SIZE * each.size), each)
            for lost_share, each in worth
            if lost_share >= WORTH_A_STRETCH
        )
        return max(ranked, key=lambda each: (each[0], -each[1].first), default=(0.0, None))[1]

    def _middle(self, first: int, size: int) -> _Middle:
        """From this place as far as it goes with the entries of its size."""
        if (first, size) not in self._middles:
            self._middles[first, size] = self._found_middle(first, size)
        return self._middles[first, size]

    def _found_middle(self, first: int, size: int) -> _Middle:
        wanted = set[int]()
        found = _Middle(first, first, (), (), size)
        places: tuple[int, ...] = ()
        for p in range(first, self._large.n_nodes):
            here = {*self._makers_read(p), *self._recomputed.get(p, ())}
            if here:
                places = (*places, p)
                wanted |= here
                nodes = self._with_makers(wanted)
                if found.places and len(places) * len(nodes) > ENTRIES[size]:
                    break
            found = _Middle(first, p, places, nodes, size)
        return found

    def _makers_read(self, p: int) -> Iterator[int]:
        """Forward nodes whose outputs node p reads."""
        makers = (self._large.maker[u] for u in self._large.reads[p])
        return (n for n in makers if n < self._large.n_forward)

    def _with_makers(self, wanted: set[int]) -> tuple[int, ...]:
        """Those wanted and what they read, no earlier than the earliest of them."""
        found = wanted.union(*(self._makers_read(n) for n in wanted))
        earliest = min(wanted)
        return tuple(sorted(n for n in found if n >= earliest and self._large.recomputable[n]))

    def around(self, middle: _Middle) -> Stretch:
        """With the places before and after it."""
        n_near = N_NEAR[middle.size]
        before = [p for p in self.places if p < middle.first]
        after = [p for p in self.places if p > middle.last][:n_near]
        before = before[len(before) - n_near :] if n_near else []
        menu = {p: tuple(sorted(set(self._recomputed[p]))) for p in (*before, *after)}
        menu |= dict.fromkeys(middle.places, middle.nodes)
        return Stretch(min([*before, middle.first]), max([*after, middle.last]), menu)
