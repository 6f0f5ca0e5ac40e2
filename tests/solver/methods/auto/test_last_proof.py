"""The last proof: below the truth, and above what stages before prove."""

import math
import random

import pytest

from graphs.graph import Graph
from solver.bound import StorageGraph, binding_cut
from solver.methods.auto import last_proof as module
from solver.methods.auto import prove_more, stages
from solver.methods.auto.search import Search
from solver.methods.least_budget import find_obstacle
from solver.methods.proposal import Proposal
from solver.schedule import simulate
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.small_graphs import random_step
from tests.support.synthetic_graphs import chain, random_dag, u_shape


def proven(graph: Graph, *, budget_bytes: int) -> tuple[float, float]:
    """Of the step's time: what the single cut proves, and the last proof after it."""
    search = Search(StorageGraph.of(graph), budget_bytes=budget_bytes, time_limit_s=math.inf)
    with search:
        stages.single_cut(search)
    proposal = prove_more(graph, budget_bytes=budget_bytes, time_limit_s=math.inf)
    return search.lost_share, proposal.lower_bound_s / graph.baseline_time_s - 1.0


@pytest.mark.slow(sample=2, keep=4)
@pytest.mark.parametrize("seed", range(40))
def test_it_is_below_the_truth(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_DISTANCE", 0)
    if seed % 2:  # by HiGHS
        monkeypatch.setattr(module, "has_scip", lambda: False)
    rng = random.Random(seed)
    for k in range(10):
        graph = random_dag(
            seed=10 * seed + k, n_forward=rng.randint(3, 6), n_later=rng.randint(2, 4)
        )
        if k % 2:
            graph = random_step(seed=10 * seed + k, n_forward=5, n_later=4)
        budget_bytes = least_peak_bytes(graph)
        truth_s = fastest(graph, budget_bytes=budget_bytes).time_s
        before, after = proven(graph, budget_bytes=budget_bytes)
        assert before - 1e-9 <= after <= truth_s / graph.baseline_time_s - 1.0 + 1e-9


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("graph", [u_shape(depth=4), chain(n_blocks=12)], ids=["u", "chain"])
def test_it_proves_more_where_stretches_are_recomputed_again(graph: Graph) -> None:
    limits = {"budget_bytes": find_obstacle(graph).reached_bytes, "time_limit_s": math.inf}
    before = binding_cut(StorageGraph.of(graph), budget_bytes=limits["budget_bytes"]).lost_share
    enough_share = 1.2 * before + module.WORTH_GAP  # where it may end
    known_s = graph.baseline_time_s * (1.0 + enough_share)
    proposal = prove_more(graph, **limits, known_s=known_s)
    assert proposal.lower_bound_s / graph.baseline_time_s - 1.0 > 1.2 * before - 1e-6


def test_it_ends_once_the_gap_is_not_worth_it() -> None:
    graph = chain(n_blocks=12)
    limits = {"budget_bytes": find_obstacle(graph).reached_bytes, "time_limit_s": math.inf}
    proven_s = 1.2 * graph.baseline_time_s
    proposal = prove_more(graph, **limits, proven_s=proven_s, known_s=1.205 * graph.baseline_time_s)
    assert proposal == Proposal(None, lower_bound_s=pytest.approx(proven_s))


def test_a_solution_that_does_not_overflow_is_proposed() -> None:
    n_proposed = 0
    for seed in range(20):
        graph = random_dag(seed=seed, n_forward=5, n_later=3)
        budget_bytes = least_peak_bytes(graph) + 5
        proposal = prove_more(graph, budget_bytes=budget_bytes, time_limit_s=math.inf)
        if proposal.schedule is not None:
            n_proposed += 1
            simulation = simulate(graph, proposal.schedule)
            assert simulation.peak_bytes <= budget_bytes
            least_s = proposal.lower_bound_s
            assert simulation.time_s <= least_s + 2 * module.GAP * graph.baseline_time_s
    assert n_proposed >= 3
