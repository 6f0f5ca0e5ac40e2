"""Large neighbourhood search: plan one stretch of the step after another anew, the rest fixed.

Near the minimum budget most of the time is lost in a few stretches: on DenseNet-121 two thirds of
it while the first of four dense blocks runs backward. Eviction and cuts each find one way through
such a stretch, and recombination only combines ways that were found. Here a stretch is planned anew
by an integer program (`solver.methods.auto.stretch_program`). In its middle, all nodes that matter
there may be recomputed before each position at which the best schedule recomputes or a backward
node reads; before and after the middle, only what the best schedule recomputes.

A middle begins where the best schedule recomputes and is as long as its size allows. In each round,
the middles that lose the most and whose stretches do not overlap are solved in parallel. But a size
must lose LOSS_PER_SIZE times as much as the size below it to come first: the programs of small ones
are solved in hundredths of a second, those of the largest in ten seconds. If nothing is found, the
positions in the first half of the middle go on to the next size; if something is found, all
positions of the stretch go back to the size below.

In the manner of Shaw 1998, "Using constraint programming and local search methods to solve vehicle
routing problems". The search ends when no middle loses enough, or after MAX_VAIN_WORK work
without gain. It proves nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from graphs.graph import Graph
from solver.bound import StorageGraph, large_units_only
from solver.methods.auto.menu_program import kept_by_best
from solver.methods.auto.runs import Runs, live_bytes
from solver.methods.auto.search import Search
from solver.methods.auto.stretch_program import Stretch, StretchMilp
from solver.methods.proposal import Proposal
from solver.schedule import Schedule, Simulation
from solver.sizes_deadlines_progress import run_in_parallel

MAX_ENTRIES = (150, 300, 600, 1200)
"""Maximum size of a middle's menu, nodes times positions, by the middle's size."""
MAX_NODES = 5_000
"""Maximum nodes of a middle of one position, at any size: 1000 residual blocks recompute 3000 at
once.
"""
N_NEAR = (0, 4, 8, 12)
"""By size: positions before the middle, and after it, whose recomputation may change too."""
N_PARALLEL = 4
"""Stretches solved in parallel, regardless of the number of processors, so that results do not
depend on it.
"""
LOSS_PER_SIZE = 2**1.5
"""How many times as much a middle must lose as one of the size below to be as urgent."""
MAX_WORK = 500_000_000
"""Limit on the sum of squared columns over all programs, about a minute."""
MAX_VAIN_WORK = 150_000_000
"""The same over programs in a row without gain, after which the search ends."""
LEAST_GAIN = 2e-4
"""A smaller share of the baseline's time does not count as a gain. On the LSTM of 200 steps, seven
gains made 0.06 points.
"""
WORTH_GAP = 0.05
"""With a gap below this share of the baseline's time the search does not start."""
LEAST_STRETCH_LOSS = 2e-3
"""Middles that lose less than this share of the baseline's time are not solved."""


def refine(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    start: Schedule,
    proven_s: float,
) -> Proposal:
    """A schedule at least as fast as `start`, which must be legal and within the budget.

    proven_s: provably no schedule is faster.
    """
    search = Search(StorageGraph.of(graph), budget_bytes=budget_bytes, time_limit_s=time_limit_s)
    with search:
        search.offer(start)
        search.prove(proven_s / (graph.baseline_time_s or 1.0) - 1.0)
        if WORTH_GAP <= search.gap < math.inf:
            search_neighbourhoods(search)
    return search.proposal()


def search_neighbourhoods(search: Search) -> None:
    """Replan stretches of the best schedule, as the module describes, and offer the results."""
    work, vain_work = 0, 0
    sizes: dict[int, int] = defaultdict(int)  # by position, the smallest size still to be tried
    large = large_units_only(search.folded, search.budget_bytes)
    plan: _Plan | None = None
    while not search.is_close and search.best and work <= MAX_WORK and vain_work <= MAX_VAIN_WORK:
        if plan is None or plan.schedule is not search.best[0]:
            plan = _Plan(search.folded, large, *search.best)
        middles = plan.next_middles(sizes)
        if not middles:
            return
        solved = run_in_parallel(
            [partial(_solve_middle, search, plan, middle) for middle in middles]
        )
        for middle, (program, kept) in zip(middles, solved, strict=True):
            before, cost = search.best_share, program.n_columns**2
            was_best = search.best[0]
            if kept is not None:
                _offer_spliced(search, program, kept)
            work += cost
            vain_work = 0 if search.best_share <= before - LEAST_GAIN else vain_work + cost
            # After a gain, try smaller sizes around it again; otherwise a larger size here.
            if search.best[0] is not was_best:
                for p in range(middle.stretch.first, middle.stretch.last + 1):
                    sizes[p] = min(sizes[p], max(0, middle.size - 1))
            # If another stretch has changed the plan meanwhile, this one may be tried again.
            elif kept is None or was_best is plan.schedule:
                for p in middle.menu_positions[: (len(middle.menu_positions) + 1) // 2]:
                    sizes[p] = max(sizes[p], middle.size + 1)


def _solve_middle(
    search: Search, plan: _Plan, middle: _Middle
) -> tuple[StretchMilp, dict[int, frozenset[int]] | None]:
    """Solve the middle's stretch. Returns the program, and what the best solution found keeps."""
    stretch = middle.stretch
    program = StretchMilp(
        search.folded,
        stretch,
        runs=plan.runs,
        live_bytes=plan.live_bytes,
        budget_bytes=search.budget_bytes,
        deadline=search.deadline,
    )
    below = plan.lost_share(stretch.first, stretch.last)
    return program, kept_by_best(program, below=below, deadline=search.deadline)


def _offer_spliced(
    search: Search, program: StretchMilp, kept: Mapping[int, frozenset[int]]
) -> None:
    """Put the solution in the place of its stretch in the best schedule, which may be newer."""
    assert search.best is not None
    found = program.splice_into(kept, Runs(search.folded, search.best[0].order))
    if search.is_faster(found.order):
        search.offer_improved(found)


@dataclass(frozen=True)
class _Middle:
    """A part of the step in which recomputation is planned freely.

    menu_positions: positions right before which all nodes that matter there may be recomputed.
    size: index into MAX_ENTRIES.
    stretch: the middle and the positions near it.
    """

    menu_positions: tuple[int, ...]
    size: int
    stretch: Stretch


class _Plan:
    """A schedule, and where it recomputes.

    recompute_at: positions, except the end, right before which it recomputes, in order.
    """

    def __init__(
        self,
        folded: StorageGraph,
        large: StorageGraph,
        schedule: Schedule,
        simulation: Simulation,
    ) -> None:
        """Find where the schedule recomputes.

        large: the step without units that are small relative to the budget.
        """
        self.schedule = schedule
        self.runs = Runs(folded, schedule.order)
        self.live_bytes = live_bytes(schedule, simulation)
        self._large = large
        self._recomputed: dict[int, list[int]] = defaultdict(list)
        lost_s = np.zeros(folded.n_nodes + 1)
        n_first_runs = 0
        for i, n in enumerate(self.runs.nodes):
            if self.runs.first_run[n] == i:
                n_first_runs += 1
            elif n_first_runs < folded.n_nodes:
                self._recomputed[n_first_runs].append(n)
                lost_s[n_first_runs] += folded.time_s[n]
        self.recompute_at = sorted(self._recomputed)
        self._lost_share_until = np.cumsum(lost_s) / (folded.graph.baseline_time_s or 1.0)
        self._middles: dict[tuple[int, int], _Middle | None] = {}

    def lost_share(self, first: int, last: int) -> float:
        """Recompute time between two positions, at least 1, as a share of the baseline's time."""
        return float(self._lost_share_until[last] - self._lost_share_until[first - 1])

    def next_middles(self, sizes: Mapping[int, int]) -> list[_Middle]:
        """The middles that lose the most and whose stretches do not overlap, at most N_PARALLEL.

        sizes: by position, the smallest size to try. Returns an empty list if none is worth
            solving.
        """
        ranked = sorted(self._smallest_worth_solving(sizes), key=self._urgency, reverse=True)
        found: list[_Middle] = []
        for middle in ranked:
            if all(_are_apart(middle.stretch, other.stretch) for other in found):
                found.append(middle)
            if len(found) == N_PARALLEL:
                break
        return found

    def _urgency(self, middle: _Middle) -> tuple[float, int]:
        """Sort key: the loss relative to the size; if equal, the earlier middle is more urgent."""
        return self._lost_share_in(middle) / LOSS_PER_SIZE**middle.size, -middle.menu_positions[0]

    def _smallest_worth_solving(self, sizes: Mapping[int, int]) -> Iterator[_Middle]:
        """Yield for each position the middle of the smallest size that loses enough."""
        for p in self.recompute_at:
            for size in range(sizes[p], len(MAX_ENTRIES)):
                if (p, size) not in self._middles:
                    self._middles[p, size] = self._longest_middle(p, size)
                middle = self._middles[p, size]
                if middle is not None and self._lost_share_in(middle) >= LEAST_STRETCH_LOSS:
                    yield middle
                    break

    def _lost_share_in(self, middle: _Middle) -> float:
        return self.lost_share(middle.menu_positions[0], middle.menu_positions[-1])

    def _longest_middle(self, first: int, size: int) -> _Middle | None:
        """The middle from this position on, as long as its size allows; None: too many nodes."""
        wanted_nodes = set[int]()
        positions: tuple[int, ...] = ()
        nodes: tuple[int, ...] = ()
        for p in range(first, self._large.n_nodes):
            nodes_here = {*self._makers_read(p), *self._recomputed.get(p, ())}
            if not nodes_here:
                continue
            wanted_nodes |= nodes_here
            longer = self._with_makers(wanted_nodes)
            if (len(positions) + 1) * len(longer) > (MAX_ENTRIES[size] if positions else MAX_NODES):
                break
            positions, nodes = (*positions, p), longer
        return (
            _Middle(positions, size, self._stretch_around(positions, nodes, size))
            if positions
            else None
        )

    def _makers_read(self, p: int) -> Iterator[int]:
        """Forward nodes whose outputs node p reads."""
        makers = (self._large.maker[u] for u in self._large.reads[p])
        return (n for n in makers if n < self._large.n_forward)

    def _with_makers(self, wanted: set[int]) -> tuple[int, ...]:
        """The wanted nodes and the makers of what they read, from the earliest wanted node on."""
        found = wanted.union(*(self._makers_read(n) for n in wanted))
        earliest = min(wanted)
        return tuple(sorted(n for n in found if n >= earliest and self._large.recomputable[n]))

    def _stretch_around(
        self, positions: Sequence[int], nodes: tuple[int, ...], size: int
    ) -> Stretch:
        """The middle with the positions near it at which the schedule recomputes."""
        n_near, recompute_at = N_NEAR[size], self.recompute_at
        before = bisect_left(recompute_at, positions[0])
        after = bisect_right(recompute_at, positions[-1])
        near = [
            *recompute_at[max(0, before - n_near) : before],
            *recompute_at[after : after + n_near],
        ]
        menu = {p: tuple(sorted(set(self._recomputed[p]))) for p in near}
        menu |= dict.fromkeys(positions, nodes)
        return Stretch(min(menu), max(menu), menu)


def _are_apart(one: Stretch, other: Stretch) -> bool:
    return one.last < other.first or other.last < one.first
