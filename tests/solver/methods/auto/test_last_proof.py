"""The last proof: below the truth, above what stages before prove, and only if time is given."""

import dataclasses
import math
import random
from typing import Any

import pytest

from graphs.graph import Graph
from graphs.rewrites import Variants
from solver.bound import StorageGraph
from solver.methods import METHODS, Proposal
from solver.methods.auto import last_proof as module
from solver.methods.auto import stages
from solver.methods.auto.search import Search
from solver.methods.least_budget import find_obstacle, least_schedule
from solver.schedule import Request, simulate
from solver.solving import attempt
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.builders import odd_graph
from tests.support.nets import chain, random_dag, u_shape


def proven(graph: Graph, *, budget_bytes: int) -> tuple[float, float]:
    """Of the step's time: what the single cut proves, and the last proof after it."""
    folded = StorageGraph.of(graph)
    search = Search(folded, budget_bytes=budget_bytes, time_limit_s=math.inf)
    with search:
        stages.single_cut(search)
        before = search.lost_share
        schedule, _ = least_schedule(folded, proven_bytes=budget_bytes)
        search.best = schedule, simulate(graph, schedule)  # within the budget or not
        module.last_proof(search)
    return before, search.lost_share


@pytest.mark.slow(sample=2, keep=4)
@pytest.mark.parametrize("seed", range(40))
def test_it_is_below_the_truth(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_GAP", 0.0)
    monkeypatch.setattr(module, "LEAST_DISTANCE", 0)
    rng = random.Random(seed)
    for k in range(10):
        graph = random_dag(
            seed=10 * seed + k, n_forward=rng.randint(3, 6), n_later=rng.randint(2, 4)
        )
        if k % 2:
            graph = odd_graph(seed=10 * seed + k, n_forward=5, n_later=4)
        budget_bytes = least_peak_bytes(graph)
        truth_s = fastest(graph, budget_bytes=budget_bytes).time_s
        before, after = proven(graph, budget_bytes=budget_bytes)
        assert before <= after <= truth_s / graph.baseline_time_s - 1.0 + 1e-9


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("graph", [u_shape(depth=4), chain(n_blocks=12)], ids=["u", "chain"])
def test_it_proves_more_where_stretches_are_recomputed_again(graph: Graph) -> None:
    before, after = proven(graph, budget_bytes=find_obstacle(graph).reached_bytes)
    assert after > 1.2 * before


def test_only_a_long_time_limit_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def propose(graph: Graph, *, thorough: bool, **options: Any) -> Proposal:
        asked.append(thorough)
        return Proposal(None)

    method = dataclasses.replace(METHODS["auto"], propose=propose)
    monkeypatch.setattr("solver.solving.solve_request.METHODS", {**METHODS, "auto": method})
    graph = chain(n_blocks=2)
    for time_limit_s, thorough in ((60.0, True), (300.0, True), (300.0, False)):
        request = Request(budget_bytes=10**9, time_limit_s=time_limit_s)
        attempt(graph, request, thorough=thorough)
    assert asked == [False, True, False]
    variants = Variants(graph, (graph, chain(n_blocks=3)))
    attempt(variants, request, thorough=True)
    assert len(asked) > 3
    assert not any(asked[3:])
