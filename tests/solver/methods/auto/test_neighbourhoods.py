"""Large neighbourhood search: what is planned anew, in which order, and what that gives."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from graphs.graph import Graph
from solver.bound.lower_bound import binding_cut, proven_least_budget_bytes
from solver.bound.storage_graph import StorageGraph
from solver.bound.windows import large_units_only
from solver.methods.auto import neighbourhoods
from solver.methods.auto.from_cuts import fold_simulation
from solver.methods.auto.neighbourhoods import (
    LOSS_PER_SIZE,
    MAX_ENTRIES,
    N_NEAR,
    N_PARALLEL,
    refine,
    search_neighbourhoods,
)
from solver.methods.auto.search import Search
from solver.methods.least_budget import least_schedule
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import c_calls
from tests.support.budgets import baseline_peak_bytes
from tests.support.small_graphs import random_step
from tests.support.synthetic_graphs import dense, pyramid, residual, transformer, u_shape

NETS = {
    "transformer": transformer(n_layers=2),
    "pyramid": pyramid(n_blocks=(1, 1, 1)),
    "dense": dense(n_layers=5),
    "residual": residual(n_blocks=5),
    "u_shape": u_shape(depth=3),
}
LEFT = {"transformer": 0.1, "pyramid": 0.6, "dense": 0.1, "residual": 0.3, "u_shape": 0.9}
"""Of the gap, at most."""
SOME_WORK = 4_000_000
"""Of a second at most in each of these nets: what follows on `residual` takes a minute and gains
nothing."""


def searched(graph: Graph) -> Search:
    """A search near the least budget whose best schedule reaches it.

    Such a schedule wastes time: it goes for few bytes alone.
    """
    folded = StorageGraph.of(graph)
    proven_bytes = proven_least_budget_bytes(folded)[0]
    schedule, reached_bytes = least_schedule(folded, proven_bytes=proven_bytes)
    budget_bytes = reached_bytes + (baseline_peak_bytes(graph) - reached_bytes) // 10
    search = Search(folded, budget_bytes=budget_bytes, time_limit_s=math.inf)
    search.prove(binding_cut(folded, budget_bytes=budget_bytes).lost_share)
    assert search.offer(schedule) is not None
    return search


def nodes_of(middle: neighbourhoods._Middle) -> Sequence[int]:
    return middle.stretch.menu[middle.menu_positions[0]]


def plan_of(search: Search) -> neighbourhoods._Plan:
    large = large_units_only(search.folded, search.budget_bytes)
    return neighbourhoods._Plan(search.folded, large, *search.best)


@pytest.mark.slow
def test_plans_get_better_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhoods, "MAX_WORK", SOME_WORK)
    left = {}
    for name, graph in NETS.items():
        search = searched(graph)
        before, gap_before = search.best_share, search.gap
        search_neighbourhoods(search)
        assert search.lost_share - 1e-6 <= search.best_share <= before
        assert simulate(graph, search.best[0]).peak_bytes <= search.budget_bytes
        left[name] = search.gap / gap_before
    assert all(left[name] < most for name, most in LEFT.items()), left


@pytest.mark.parametrize("name", NETS)
def test_middles_begin_where_the_plan_recomputes_and_are_as_long_as_they_may(name: str) -> None:
    search = searched(NETS[name])
    plan = plan_of(search)
    recomputed = fold_simulation(search.folded, search.best[0]).recomputed
    assert plan.recompute_at == sorted({p for _, p in recomputed if p < search.folded.n_nodes})
    for first in plan.recompute_at:
        middles = [plan._longest_middle(first, size) for size in range(len(MAX_ENTRIES))]
        for most, middle, larger in zip(MAX_ENTRIES, middles, [*middles[1:], None], strict=True):
            menu_at = middle.menu_positions
            assert menu_at[0] == first
            assert {*plan.recompute_at} & {*range(first, menu_at[-1] + 1)} <= {*menu_at}
            assert {n for n, p in recomputed if first <= p <= menu_at[-1]} <= {*nodes_of(middle)}
            assert len(menu_at) * len(nodes_of(middle)) <= most
            if larger is not None and len(larger.menu_positions) > len(menu_at):
                assert len(nodes_of(larger)) * (len(menu_at) + 1) > most  # one more is too much


@pytest.mark.parametrize("name", NETS)
def test_near_a_middle_only_what_the_plan_recomputes_may_be_recomputed(name: str) -> None:
    search = searched(NETS[name])
    plan = plan_of(search)
    recomputed: dict[int, set[int]] = defaultdict(set)
    for n, p in fold_simulation(search.folded, search.best[0]).recomputed:
        recomputed[p].add(n)
    for size, n_near in enumerate(N_NEAR):
        for first in plan.recompute_at:
            middle = plan._longest_middle(first, size)
            stretch = middle.stretch
            before = [p for p in plan.recompute_at if p < first]
            after = [p for p in plan.recompute_at if p > middle.menu_positions[-1]]
            near = [*before[::-1][:n_near], *after[:n_near]]
            assert {*stretch.menu} == {*middle.menu_positions, *near}
            assert (stretch.first, stretch.last) == (min(stretch.menu), max(stretch.menu))
            for p, nodes in stretch.menu.items():
                assert {*nodes} == (
                    {*nodes_of(middle)} if p in middle.menu_positions else recomputed[p]
                )


@dataclasses.dataclass
class Program:
    """n_columns: whose square counts as work."""

    n_columns: int


Solved = tuple[Program, dict[int, frozenset[int]] | None]


def tried(
    search: Search,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gain_at: int | None = None,
    n_columns: int = 0,
) -> list[neighbourhoods._Middle]:
    """The middles, in order, where only the attempt of this number finds something."""
    middles: list[neighbourhoods._Middle] = []

    def solved(_search: Search, _plan: object, middle: neighbourhoods._Middle) -> Solved:
        middles.append(middle)
        return Program(n_columns), {} if len(middles) - 1 == gain_at else None

    def offer(search: Search, *_: object) -> None:
        search.best = dataclasses.replace(search.best[0]), search.best[1]

    monkeypatch.setattr(neighbourhoods, "run_in_parallel", lambda calls: [call() for call in calls])
    monkeypatch.setattr(neighbourhoods, "_solve_middle", solved)
    monkeypatch.setattr(neighbourhoods, "_offer_spliced", offer)
    search_neighbourhoods(search)
    return middles


@pytest.mark.parametrize("name", NETS)
def test_where_nothing_is_found_the_next_middle_is_larger(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = searched(NETS[name])
    middles, plan = tried(search, monkeypatch), plan_of(search)
    assert {each.size for each in middles} == {*range(len(MAX_ENTRIES))}
    sizes = dict.fromkeys(plan.recompute_at, 0)
    for each in middles:
        assert sizes[each.menu_positions[0]] <= each.size
        for p in each.menu_positions[: (len(each.menu_positions) + 1) // 2]:
            sizes[p] = max(sizes.get(p, 0), each.size + 1)
    assert {sizes[p] for p in plan.recompute_at} == {len(MAX_ENTRIES)}  # nothing is left to try
    losses = [plan._lost_share_in(each) / LOSS_PER_SIZE**each.size for each in middles]
    assert losses[0] == max(losses)


def test_where_something_is_found_smaller_middles_are_next(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched(NETS["residual"])
    with monkeypatch.context() as patched:
        n_tried = len(tried(search, patched))
    middles = tried(search, monkeypatch, gain_at=n_tried - 1)
    assert middles[n_tried - 1].size == len(MAX_ENTRIES) - 1
    assert middles[n_tried].size == len(MAX_ENTRIES) - 2


def test_the_search_ends_after_work_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_VAIN_WORK", "MAX_WORK"):
        with monkeypatch.context() as patched:
            patched.setattr(neighbourhoods, limit, 20)
            patched.setattr(neighbourhoods, "N_PARALLEL", 1)
            assert len(tried(searched(NETS["residual"]), patched, n_columns=3)) == 3


def test_stretches_that_are_solved_at_once_do_not_overlap() -> None:
    for name, graph in NETS.items():
        middles = plan_of(searched(graph)).next_middles(defaultdict(int))
        assert 0 < len(middles) <= N_PARALLEL, name
        ends = sorted((each.stretch.first, each.stretch.last) for each in middles)
        assert all(last < first for (_, last), (first, _) in pairwise(ends)), name


@pytest.mark.slow
def test_the_plan_does_not_depend_on_the_number_of_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbourhoods, "MAX_WORK", SOME_WORK)
    n_at_once = []
    in_parallel = neighbourhoods.run_in_parallel

    def run_in_parallel(calls: Sequence[Callable[[], Solved]]) -> list[Solved]:
        n_at_once.append(len(calls))
        return in_parallel(calls)

    monkeypatch.setattr(neighbourhoods, "run_in_parallel", run_in_parallel)
    for name in ("transformer", "dense", "u_shape"):
        orders = []
        for n_processors in (1, 4):
            monkeypatch.setattr(c_calls, "_n_processors", lambda n=n_processors: n)
            search = searched(NETS[name])
            before = search.best_share
            search_neighbourhoods(search)
            assert search.best_share < before
            orders.append(search.best[0].order)
        assert orders[0] == orders[1]
    assert max(n_at_once) > 1


def test_refining_ends_at_once_where_the_gap_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhoods, "search_neighbourhoods", lambda *_: pytest.fail("searched"))
    search = searched(NETS["residual"])
    schedule, simulation = search.best
    proposal = refine(
        search.graph,
        budget_bytes=search.budget_bytes,
        time_limit_s=math.inf,
        start=schedule,
        proven_s=simulation.time_s - 0.04 * search.graph.baseline_time_s,
    )
    assert proposal.schedule is schedule
    assert not proposal.timed_out


def test_no_time_leaves_what_is_known() -> None:
    search = searched(NETS["residual"])
    proposal = refine(
        search.graph,
        budget_bytes=search.budget_bytes,
        time_limit_s=0.0,
        start=search.best[0],
        proven_s=0.0,
    )
    assert proposal.schedule is search.best[0]
    assert proposal.timed_out


@pytest.mark.slow(sample=4, keep=8)
@pytest.mark.parametrize("seed", range(40))
def test_strange_steps_are_refined_without_a_crash(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aliases, huge and empty tensors, several outputs: legal, within the budget, no slower."""
    for name, value in {"WORTH_GAP": 0.0, "LEAST_STRETCH_LOSS": 0.0, "MAX_WORK": 10**6}.items():
        monkeypatch.setattr(neighbourhoods, name, value)
    for graph in (random_step(20 * seed + k) for k in range(20)):
        folded = StorageGraph.of(graph)
        proven_bytes, _ = proven_least_budget_bytes(folded)
        start, reached_bytes = least_schedule(folded, proven_bytes=proven_bytes)
        budget_bytes = reached_bytes + (baseline_peak_bytes(graph) - reached_bytes) // 5
        refined = refine(
            graph, budget_bytes=budget_bytes, time_limit_s=math.inf, start=start, proven_s=0.0
        )
        simulation = simulate(graph, refined.schedule)
        assert simulation.peak_bytes <= budget_bytes
        assert simulation.time_s <= simulate(graph, start).time_s
