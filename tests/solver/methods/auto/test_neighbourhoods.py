"""Large neighbourhood search: which stretches it frees, in which order; plans only get better."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import pytest

from graphs.graph import Graph
from solver.bound.lower_bound import binding_cut, proven_least_budget_bytes
from solver.bound.storage_graph import StorageGraph
from solver.bound.windows import large_units_only
from solver.methods.auto import neighbourhoods
from solver.methods.auto.from_cuts import fold_simulation
from solver.methods.auto.neighbourhoods import ENTRIES, N_NEAR, refine, search_neighbourhoods
from solver.methods.auto.search import Search
from solver.methods.least_budget import least_schedule
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from tests.support.nets import dense, pyramid, residual, transformer, u_shape

NETS = {
    "transformer": transformer(n_layers=2),
    "pyramid": pyramid(n_blocks=(1, 1, 1)),
    "dense": dense(n_layers=5),
    "residual": residual(n_blocks=5),
    "u_shape": u_shape(depth=3),
}


def searched(graph: Graph) -> Search:
    """A search near the least budget whose best schedule reaches it.

    Such a schedule wastes time: it goes for few bytes alone.
    """
    folded = StorageGraph.of(graph)
    proven_bytes = proven_least_budget_bytes(folded)[0]
    schedule, reached_bytes = least_schedule(folded, proven_bytes=proven_bytes)
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    budget_bytes = reached_bytes + (peak_bytes - reached_bytes) // 10
    search = Search(folded, budget_bytes=budget_bytes, time_limit_s=math.inf)
    search.prove(binding_cut(folded, budget_bytes=budget_bytes).lost_share)
    assert search.offer(schedule) is not None
    return search


def plan_of(search: Search) -> neighbourhoods._Plan:
    assert search.best is not None
    large = large_units_only(search.folded, search.budget_bytes)
    return neighbourhoods._Plan(search.folded, large, *search.best)


@pytest.mark.slow
def test_plans_get_better_and_fit() -> None:
    left = []
    for graph in NETS.values():
        search = searched(graph)
        before, gap_before = search.best_share, search.gap
        search_neighbourhoods(search)
        assert search.lost_share - 1e-6 <= search.best_share <= before
        assert search.best is not None
        assert simulate(graph, search.best[0]).peak_bytes <= search.budget_bytes
        left.append(search.gap / gap_before)
    assert min(left) < 0.2
    assert max(left) < 0.9


@pytest.mark.parametrize("name", NETS)
def test_middles_begin_where_something_is_recomputed(name: str) -> None:
    search = searched(NETS[name])
    plan = plan_of(search)
    assert search.best is not None
    recomputed = fold_simulation(search.folded, search.best[0]).recomputed
    assert plan.places == sorted({p for _, p in recomputed if p < search.folded.n_nodes})
    for size, most in enumerate(ENTRIES):
        for place in plan.places:
            middle = plan._middle(place, size)
            assert middle.first == middle.places[0] == place
            assert set(plan.places) & {*range(place, middle.last + 1)} <= {*middle.places}
            assert len(middle.places) * len(middle.nodes) <= most or len(middle.places) == 1
            assert {n for n, p in recomputed if place <= p <= middle.last} <= {*middle.nodes}


@pytest.mark.parametrize("name", NETS)
def test_around_a_middle_only_what_is_recomputed_there_is_free(name: str) -> None:
    search = searched(NETS[name])
    plan = plan_of(search)
    assert search.best is not None
    recomputed: dict[int, set[int]] = defaultdict(set)
    for n, p in fold_simulation(search.folded, search.best[0]).recomputed:
        recomputed[p].add(n)
    for size, n_near in enumerate(N_NEAR):
        middle = plan._middle(plan.places[len(plan.places) // 2], size)
        stretch = plan.around(middle)
        before = [p for p in stretch.menu if p < middle.first]
        after = [p for p in stretch.menu if p > middle.last]
        assert len(before) <= n_near
        assert len(after) <= n_near
        assert {*range(stretch.first, middle.first)} & {*plan.places} == {*before}
        assert {*range(middle.last + 1, stretch.last + 1)} & {*plan.places} == {*after}
        for p, nodes in stretch.menu.items():
            assert {*nodes} == ({*middle.nodes} if p in middle.places else recomputed[p])


def test_places_where_nothing_is_found_get_larger_and_larger_stretches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    monkeypatch.setattr(
        neighbourhoods, "_offer_planned_anew", lambda _, plan, middle: tried.append(middle) or 0
    )
    search = searched(NETS["residual"])
    search_neighbourhoods(search)
    assert len({(each.first, each.size) for each in tried}) == len(tried)
    assert {each.size for each in tried} == {*range(len(ENTRIES))}
    plan = plan_of(search)
    losses = [plan.lost_share(each.first, each.last) for each in tried if each.size == 0]
    assert losses == sorted(losses, reverse=True)
    for place in plan.places:
        covering = [each for each in tried if each.first <= place <= (each.first + each.last) // 2]
        size = max((each.size + 1 for each in covering), default=0)
        if size < len(ENTRIES):
            lost_share = plan.lost_share(place, plan._middle(place, size).last)
            assert lost_share < neighbourhoods.WORTH_A_STRETCH


def test_the_search_ends_after_work_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_IN_VAIN", "MAX_WORK"):
        tried: Iterator[None] = iter([None] * 3)
        with monkeypatch.context() as patched:
            patched.setattr(neighbourhoods, limit, 20)
            patched.setattr(neighbourhoods, "_offer_planned_anew", lambda *_, t=tried: next(t) or 7)
            search_neighbourhoods(searched(NETS["residual"]))
        assert not [*tried]


def test_refining_ends_at_once_where_the_gap_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbourhoods, "search_neighbourhoods", lambda *_: pytest.fail("searched"))
    search = searched(NETS["residual"])
    assert search.best is not None
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
    assert search.best is not None
    proposal = refine(
        search.graph,
        budget_bytes=search.budget_bytes,
        time_limit_s=0.0,
        start=search.best[0],
        proven_s=0.0,
    )
    assert proposal.schedule is search.best[0]
    assert proposal.timed_out
