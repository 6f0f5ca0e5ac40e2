"""Nodes with several outputs, aliases, and sizes far apart: `auto` and `ilp` against the truth."""

from __future__ import annotations

import json
import math

import pytest

from graphs.graph import Graph
from solver.bound import StorageGraph, lower_bound_s, proven_least_budget_bytes
from solver.methods import METHODS, find_obstacle
from solver.schedule import OPTIMAL_GAP, Request, keep
from solver.solving import attempt
from tests.support.aliasing import aliasing_dag
from tests.support.brute_force import Optimum, fastest, least_peak_bytes
from tests.support.budgets import baseline_peak_bytes
from tests.support.overwriting import overwriting_dag
from tests.support.paths import DATA
from tests.support.plain_simulator import simulate_plainly
from tests.support.synthetic_graphs import random_dag

GIVEN = json.loads((DATA / "aliases.json").read_text())
SAME = 2e-6
"""Share of the baseline's time by which the integer program may miss the least."""
CHUNK = 40
pytestmark = pytest.mark.filterwarnings("error:method")  # no proposal is refused


def budget_bytes(graph: Graph, seed: int, least_bytes: int) -> int:
    more = (-1, 0, 0, 1, 2, (baseline_peak_bytes(graph) - least_bytes) // 2)
    return max(1, least_bytes + more[seed % len(more)])


def check_method(graph: Graph, truth: Optimum, *, method: str, budget_bytes: int) -> None:
    """It finds the fastest schedule where there is one, and proves no more than is true."""
    solution = attempt(graph, Request(budget_bytes, method=method, time_limit_s=600))
    assert solution.lower_bound_s <= truth.time_s * (1 + 1e-9)
    if truth.ops is None:
        assert solution.schedule is None
        return
    plain = simulate_plainly(graph, solution.schedule)
    assert plain.peak_bytes <= budget_bytes
    lost_s = plain.time_s - truth.time_s
    assert lost_s >= -1e-9 * truth.time_s
    if method == "ilp":
        assert lost_s <= SAME * graph.baseline_time_s
    elif solution.status == "optimal":
        assert lost_s <= OPTIMAL_GAP * graph.baseline_time_s


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("seed", range(0, 1200, CHUNK))
def test_random_graphs(seed: int) -> None:
    for i in range(seed, seed + CHUNK):
        check_graph(aliasing_dag(i), i)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("seed", range(0, 2080, CHUNK))
def test_random_graphs_with_overwrites(seed: int) -> None:
    graphs = [overwriting_dag(i) for i in range(seed, seed + CHUNK)]
    n_with = sum(any(node.overwrites for node in graph.nodes) for graph in graphs)
    assert n_with > 0.8 * CHUNK
    for i, graph in enumerate(graphs):
        check_graph(graph, seed + i)


def check_graph(graph: Graph, i: int) -> None:
    """`auto` and `ilp`, the bounds and the least budget against the truth by brute force."""
    least_bytes = least_peak_bytes(graph)
    given_bytes = budget_bytes(graph, i, least_bytes)
    truth = fastest(graph, budget_bytes=given_bytes)
    if truth.ops is not None:  # the brute force obeys the rules
        plain = simulate_plainly(graph, truth.schedule(graph))
        assert math.isclose(plain.time_s, truth.time_s)
        assert plain.peak_bytes <= given_bytes
    proven_bytes, _ = proven_least_budget_bytes(StorageGraph.of(graph))
    assert proven_bytes <= least_bytes <= find_obstacle(graph).reached_bytes
    bound_s = lower_bound_s(graph, budget_bytes=given_bytes)
    assert bound_s <= truth.time_s * (1 + 1e-9)
    for method in ("ilp", "auto"):
        check_method(graph, truth, method=method, budget_bytes=given_bytes)


@pytest.mark.slow(sample=1, keep=len(GIVEN))
@pytest.mark.parametrize("case", GIVEN, ids=lambda case: case["name"])
def test_graphs_that_once_failed(case: dict) -> None:
    graph = Graph.from_json(case["graph"])
    truth = fastest(graph, budget_bytes=case["budget_bytes"])
    for method in ("auto", "ilp"):
        check_method(graph, truth, method=method, budget_bytes=case["budget_bytes"])


def test_a_step_that_takes_no_time_and_fits_nowhere() -> None:
    graph = aliasing_dag(2058)
    assert graph.baseline_time_s == 0
    assert lower_bound_s(graph, budget_bytes=1) == math.inf
    check_graph(graph, 2058)


@pytest.mark.slow
def test_every_method_proposes_what_is_legal() -> None:
    for graph in map(aliasing_dag, range(5000, 5030)):
        peak_bytes = baseline_peak_bytes(graph)
        least_bytes, _ = proven_least_budget_bytes(StorageGraph.of(graph))
        for method in METHODS.keys() - {"ilp", "auto"}:
            request = Request((least_bytes + peak_bytes) // 2, method=method, time_limit_s=600)
            attempt(graph, request)  # a refused proposal warns


def test_what_keeps_nothing_is_legal() -> None:
    # In 1455 and 1594 an output of the step shares the storage of what is recomputed last.
    for graph in map(aliasing_dag, (*range(100), 1455, 1594)):
        simulate_plainly(graph, keep(graph, ()))


def test_eviction_makes_lost_aliases_again() -> None:
    graph = random_dag(seed=6, n_forward=16, n_later=16)
    obstacle = find_obstacle(graph)
    assert simulate_plainly(graph, obstacle.schedule).peak_bytes == obstacle.reached_bytes
