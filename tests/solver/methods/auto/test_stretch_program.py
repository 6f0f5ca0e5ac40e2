"""One stretch planned anew: what stays as it is, what its program counts, and what it finds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from graphs.graph import Graph
from solver.bound.lower_bound import proven_least_budget_bytes
from solver.bound.storage_graph import StorageGraph
from solver.methods.auto.menu_program import kept_by_best
from solver.methods.auto.runs import Runs, live_bytes
from solver.methods.auto.stretch_program import Stretch, StretchMilp
from solver.methods.exact_search import fastest_schedule
from solver.methods.least_budget import least_schedule
from solver.schedule.ops import Schedule
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import NEVER
from tests.support.budgets import baseline_peak_bytes
from tests.support.synthetic_graphs import chain, dense, random_dag, residual, transformer, u_shape

NETS = {
    "transformer": transformer(n_layers=2),
    "dense": dense(n_layers=5),
    "residual": residual(n_blocks=5),
    "u_shape": u_shape(depth=3),
}


class Planned:
    """A schedule that recomputes much, and a budget that leaves it some room."""

    def __init__(self, graph: Graph, *, share: float) -> None:
        self.graph, self.folded = graph, StorageGraph.of(graph)
        proven_bytes = proven_least_budget_bytes(self.folded)[0]
        schedule, reached_bytes = least_schedule(self.folded, proven_bytes=proven_bytes)
        peak_bytes = baseline_peak_bytes(graph)
        self.budget_bytes = reached_bytes + int(share * (peak_bytes - reached_bytes))
        self.schedule = schedule
        self.order = schedule.order
        self.runs = Runs(self.folded, self.order)

    def program(self, first: int, last: int) -> StretchMilp:
        """All that can be recomputed, at every position."""
        may = [n for n in range(self.folded.n_forward) if self.folded.recomputable[n]]
        menu = {p: [n for n in may if n < p] for p in range(first, last + 1)}
        return StretchMilp(
            self.folded,
            Stretch(first, last, menu),
            runs=self.runs,
            live_bytes=live_bytes(self.schedule, simulate(self.graph, self.schedule)),
            budget_bytes=self.budget_bytes,
        )

    def solution(self, program: StretchMilp, *, below: float = math.inf) -> Schedule | None:
        kept = kept_by_best(program, below=below, deadline=NEVER)
        return None if kept is None else program.splice_into(kept, self.runs)

    def lost_share(self, schedule: Schedule) -> float:
        return simulate(self.graph, schedule).time_s / self.graph.baseline_time_s - 1.0


def random_stretches(n: int, *, seed: int) -> Iterator[tuple[Planned, int, int]]:
    rng = random.Random(seed)
    for _ in range(n):
        graph = random_dag(seed=rng.randrange(10**6), n_forward=10, n_later=8)
        planned = Planned(graph, share=rng.choice([0.0, 0.1, 0.3]))
        first = rng.randrange(1, len(graph.nodes))
        yield planned, first, rng.randrange(first, min(first + 8, len(graph.nodes)))


@pytest.mark.slow(sample=10, keep=10)
@pytest.mark.parametrize("seed", range(100))
def test_what_is_outside_stays_and_fits(seed: int) -> None:
    """The runs before and after it, and their bytes: only the stretch itself may overflow."""
    for planned, first, last in random_stretches(4, seed=seed):
        program = planned.program(first, last)
        found = planned.solution(program)
        if found is None:
            continue
        live = live_bytes(found, simulate(planned.graph, found))
        before, after = (
            planned.order[: program.last_before + 1],
            planned.order[program.last_inside + 1 :],
        )
        n_before = found.order.index(before[-1]) + 1
        n_until_after = len(found.order) - len(after)
        runs = iter(before)
        assert all(name in runs for name in found.order[:n_before])  # in this order
        assert found.order[n_until_after:] == after
        assert live[:n_before].max() <= planned.budget_bytes
        assert live[n_until_after:].max(initial=0) <= planned.budget_bytes


@pytest.mark.slow(sample=1, keep=3)
@pytest.mark.parametrize("name", NETS)
def test_it_is_never_worse_and_fits(name: str) -> None:
    graph = NETS[name]
    planned = Planned(graph, share=0.1)
    n = len(graph.nodes)
    for first in range(planned.folded.n_forward, n, 5):
        found = planned.solution(planned.program(first, min(first + 6, n - 1)))
        assert simulate(graph, found).peak_bytes <= planned.budget_bytes
        assert planned.lost_share(found) <= planned.lost_share(planned.schedule) + 3e-4


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_the_whole_step_as_one_stretch_is_planned_as_by_the_exact_search(share: float) -> None:
    for graph in (chain(n_blocks=4), residual(n_blocks=2)):
        planned = Planned(graph, share=share)
        found = planned.solution(planned.program(1, len(graph.nodes) - 1))
        assert simulate(graph, found).peak_bytes <= planned.budget_bytes
        fastest = fastest_schedule(planned.folded, budget_bytes=planned.budget_bytes)
        assert fastest.schedule is not None
        assert planned.lost_share(found) <= planned.lost_share(fastest.schedule) + 3e-4


def test_nothing_that_loses_as_much_is_returned() -> None:
    planned = Planned(chain(n_blocks=4), share=0.1)
    program = planned.program(planned.folded.n_forward, len(planned.graph.nodes) - 1)
    best = planned.solution(program)
    lost_share = planned.lost_share(best)
    assert lost_share > 0.0
    assert planned.solution(program, below=lost_share - 1e-3) is None
    assert planned.solution(program, below=lost_share + 1e-3) is not None


def test_stretches_that_do_not_overlap_are_spliced_in_one_after_the_other() -> None:
    """Both were solved for the schedule as it was, so together they may take more than there is."""
    gained, n_over = [], 0
    for graph in (NETS["dense"], NETS["residual"]):
        planned = Planned(graph, share=0.1)
        for first in range(planned.folded.n_forward, len(graph.nodes) - 8, 4):
            early, late = planned.program(first, first + 3), planned.program(first + 4, first + 7)
            alone = planned.solution(early)
            kept = kept_by_best(late, below=math.inf, deadline=NEVER)
            both = late.splice_into(kept, Runs(planned.folded, alone.order))
            if simulate(graph, both).peak_bytes <= planned.budget_bytes:
                second = late.splice_into(kept, planned.runs)
                least = min(planned.lost_share(alone), planned.lost_share(second))
                gained.append(least - planned.lost_share(both))
            else:
                n_over += 1
    assert len(gained) > n_over > 0
    assert min(gained) >= -3e-4
    assert max(gained) > 1e-3


def test_what_could_have_stayed_is_there_only_where_it_fits() -> None:
    """It would be held since its last read, beside what the schedule holds in the meantime."""
    seen = 0
    for planned, first, last in random_stretches(60, seed=1):
        live = live_bytes(planned.schedule, simulate(planned.graph, planned.schedule))
        program = planned.program(first, last)
        for u, since in program.held_since.items():
            assert (
                planned.runs.last_read(u, program.last_before)
                == since - 1
                < program.last_before + 1
            )
            most = live[since : program.last_before + 1].max(initial=0)
            assert most == 0 or most + planned.folded.unit_bytes[u] <= planned.budget_bytes
            seen += since <= program.last_before
    assert seen > 20
