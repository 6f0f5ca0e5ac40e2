"""The exact search for small graphs against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.methods import exact_search, find_obstacle
from solver.methods.auto.stages import recompute_only
from solver.methods.exact_search import Found, fastest_schedule
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


def budgets(graph: Graph, least_bytes: int) -> set[int]:
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    quarter = (peak_bytes - least_bytes) // 4
    return {least_bytes - 1, least_bytes, least_bytes + quarter, least_bytes + 2 * quarter}


def fastest(graph: Graph, budget_bytes: int) -> Found:
    return fastest_schedule(StorageGraph.of(graph), budget_bytes=budget_bytes)


def check(graph: Graph) -> None:
    """Compare fastest schedules at some budgets, and the minimum budget, with brute force."""
    least_bytes = brute_force.least_peak_bytes(graph)
    for budget_bytes in budgets(graph, least_bytes):
        optimum = brute_force.fastest(graph, budget_bytes=budget_bytes)
        found = fastest(graph, budget_bytes)
        assert found.is_complete
        if math.isinf(optimum.time_s):
            assert found.schedule is None
            assert math.isinf(found.proven_s)
            continue
        assert found.schedule is not None
        simulation = simulate(graph, found.schedule)
        assert simulation.time_s == pytest.approx(optimum.time_s)
        assert simulation.peak_bytes <= budget_bytes
        proven_s = graph.baseline_time_s + found.proven_s
        assert proven_s <= optimum.time_s * (1 + ROUNDING)
        assert proven_s == pytest.approx(optimum.time_s, rel=1e-5)
    obstacle = find_obstacle(graph)
    assert obstacle.proven_bytes == obstacle.reached_bytes == least_bytes
    assert obstacle.schedule is not None
    assert simulate(graph, obstacle.schedule).peak_bytes == least_bytes


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
    assert fastest(aliasing_dag(seed), budget_bytes).schedule is not None


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
    proven_s = []
    for n_moves in (0, 10, 100, 10_000):
        monkeypatch.setattr(exact_search, "MAX_MOVES", n_moves)
        found = fastest(graph, budget_bytes)
        assert found.is_complete == (found.schedule is not None)
        assert graph.baseline_time_s + found.proven_s <= optimum.time_s
        proven_s.append(found.proven_s)
    assert proven_s == sorted(proven_s)
    assert proven_s[0] < proven_s[-1]
    assert found.is_complete


def test_moves_that_run_out_leave_the_minimum_budget_between_two_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = random_dag(seed=10, n_forward=14, n_later=14)
    monkeypatch.setattr(exact_search, "MAX_MOVES", 2_000)
    obstacle = find_obstacle(graph)
    monkeypatch.undo()
    exact = find_obstacle(graph)
    assert exact.proven_bytes == exact.reached_bytes == 21  # 17 by cuts, 23 by eviction
    assert obstacle.proven_bytes < 21 <= obstacle.reached_bytes < 23


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


def test_auto_finds_a_schedule_at_the_minimum_budget_although_the_moves_run_out() -> None:
    graph = random_dag(seed=3, n_forward=20, n_later=20)
    budget_bytes = find_obstacle(graph).reached_bytes
    assert budget_bytes == 24  # 27 by eviction
    assert not fastest(graph, budget_bytes).is_complete
    proposal = recompute_only(graph, budget_bytes=budget_bytes, time_limit_s=600)
    assert proposal.schedule is not None
    assert simulate(graph, proposal.schedule).peak_bytes <= budget_bytes
