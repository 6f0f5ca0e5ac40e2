"""The exact search for small graphs against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.methods.auto import exact_search
from solver.methods.auto.exact_search import solve_exactly
from solver.methods.auto.search import Search
from solver.methods.auto.stages import recompute_only
from solver.schedule import baseline, simulate
from tests.support import brute_force
from tests.support.aliasing import aliasing_dag
from tests.support.overwriting import overwriting_dag
from tests.support.small_graphs import random_step, uniform_chain
from tests.support.synthetic_graphs import random_dag

ROUNDING = 1e-12
"""Of sums of the same times in another order."""
MAX_TENSORS = 10
"""With more, brute force takes seconds."""


def searched(graph: Graph, budget_bytes: int) -> tuple[Search, bool]:
    search = Search(StorageGraph.of(graph), budget_bytes=budget_bytes, time_limit_s=600)
    with search:
        is_solved = solve_exactly(search)
    return search, is_solved


def budgets(graph: Graph) -> set[int]:
    least, peak = brute_force.least_peak_bytes(graph), simulate(graph, baseline(graph)).peak_bytes
    return {least - 1, least, least + (peak - least) // 4, (least + peak) // 2}


def check(graph: Graph) -> None:
    for budget_bytes in budgets(graph):
        optimum = brute_force.fastest(graph, budget_bytes=budget_bytes)
        search, is_solved = searched(graph, budget_bytes)
        assert is_solved
        if math.isinf(optimum.time_s):
            assert search.best is None
            assert math.isinf(search.lost_share)
            continue
        assert search.best is not None
        assert search.best[1].time_s == pytest.approx(optimum.time_s)
        assert search.best[1].peak_bytes <= budget_bytes
        proven_s = (1 + search.lost_share) * graph.baseline_time_s
        assert proven_s <= optimum.time_s * (1 + ROUNDING)
        assert proven_s == pytest.approx(optimum.time_s, rel=1e-5)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_it_finds_and_proves_the_optimum_of_every_tiny_step(first: int) -> None:
    for seed in range(first, first + 20):
        graph = random_step(seed, n_forward=5, n_later=4)
        if graph.baseline_time_s:
            check(graph)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_it_finds_and_proves_the_optimum_of_every_tiny_graph(first: int) -> None:
    for seed in range(first, first + 50):
        graph = random_dag(seed=seed, n_forward=3 + seed % 4, n_later=2 + seed % 3)
        if graph.baseline_time_s:
            check(graph)


@pytest.mark.parametrize("seed_and_budget", [(1800, 9), (2360, 18)])
def test_a_storage_that_only_a_view_of_it_needs_is_kept(seed_and_budget: tuple[int, int]) -> None:
    seed, budget_bytes = seed_and_budget
    search, _ = searched(aliasing_dag(seed), budget_bytes)
    assert search.best is not None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2_000, 200))
@pytest.mark.parametrize("make", [aliasing_dag, overwriting_dag])
def test_it_finds_and_proves_the_optimum_with_views(
    make: Callable[[int], Graph], first: int
) -> None:
    for seed in range(first, first + 200):
        graph = make(seed)
        if graph.baseline_time_s and len(graph.producer) <= MAX_TENSORS:
            check(graph)


def test_moves_that_run_out_leave_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_step(3, n_forward=7, n_later=6)
    budget_bytes = brute_force.least_peak_bytes(graph)
    optimum = brute_force.fastest(graph, budget_bytes=budget_bytes)
    shares = []
    for n_moves in (0, 10, 100, 10_000):
        monkeypatch.setattr(exact_search, "MAX_MOVES", n_moves)
        search, is_solved = searched(graph, budget_bytes)
        assert is_solved == (search.best is not None)
        assert (1 + search.lost_share) * graph.baseline_time_s <= optimum.time_s
        shares.append(search.lost_share)
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert is_solved


def test_auto_is_optimal_on_a_chain_at_its_minimum_budget() -> None:
    """Cuts prove little here, and eviction found a slower schedule."""
    graph = uniform_chain(12)
    proposal = recompute_only(graph, budget_bytes=4, time_limit_s=600)
    assert proposal.schedule is not None
    found = simulate(graph, proposal.schedule)
    assert found.peak_bytes <= 4
    assert found.time_s == pytest.approx(proposal.lower_bound_s, rel=1e-5)


def test_auto_is_optimal_on_a_random_graph_of_28_nodes() -> None:
    graph = random_dag(seed=7, n_forward=14, n_later=14)
    proposal = recompute_only(graph, budget_bytes=22, time_limit_s=600)
    assert proposal.schedule is not None
    found = simulate(graph, proposal.schedule)
    assert found.time_s == pytest.approx(proposal.lower_bound_s, rel=1e-5)
    assert (
        found.time_s / graph.baseline_time_s - 1 < 0.2
    )  # 0.31 by cuts, eviction and recombination
