"""`auto`: between bound and truth on tiny graphs, the optima of GPT-2, never worse than others."""

import math
import random

import pytest

from graphs.graph import Graph
from solver.bound.storage_graph import StorageGraph
from solver.methods.auto.local_optimum import drop_recomputation
from solver.methods.auto.search import DONE_GAP
from solver.methods.auto_method import auto
from solver.methods.evict import evict
from solver.methods.registry import METHODS
from solver.schedule.simulator import simulate
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.budgets import budget_above_least, budget_above_resident
from tests.support.paths import DATA
from tests.support.synthetic_graphs import (
    chain,
    dense,
    pyramid,
    random_dag,
    recurrent,
    residual,
    transformer,
    u_shape,
)

GPT2 = Graph.load(DATA / "gpt2_small_b8_t1024.json")
NETS = {
    "chain": chain(n_blocks=30),
    "residual": residual(n_blocks=12),
    "transformer": transformer(n_layers=3),
    "u_shape": u_shape(depth=4),
    "pyramid": pyramid(n_blocks=(2, 2, 2, 2)),
    "dense": dense(n_layers=10),
    "recurrent": recurrent(n_steps=20),
}


def overhead(graph: Graph, time_s: float) -> float:
    return time_s / graph.baseline_time_s - 1


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("seed", range(0, 320, 40))
def test_bound_truth_schedule(seed: int) -> None:
    n_found = n_cells = 0
    for i in range(seed, seed + 40):
        rng = random.Random(i)
        graph = random_dag(seed=i, n_forward=rng.randint(2, 6), n_later=rng.randint(1, 4))
        least_bytes = least_peak_bytes(graph)
        for budget_bytes in (least_bytes - 1, least_bytes, least_bytes + 2):
            truth = fastest(graph, budget_bytes=budget_bytes)
            proposal = auto(graph, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
            assert proposal.lower_bound_s <= truth.time_s + 1e-9
            if proposal.schedule is not None:
                simulation = simulate(graph, proposal.schedule)
                assert simulation.peak_bytes <= budget_bytes
                assert simulation.time_s >= truth.time_s - 1e-9
                n_found += 1
            n_cells += truth.ops is not None
    assert n_found >= 0.95 * n_cells  # the least budgets of all are for brute force


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("share", "percent"), [(0.9, 2.23), (0.8, 4.73), (0.7, 8.43), (0.6, 12.13)]
)
def test_gpt2_optima(share: float, percent: float) -> None:
    budget_bytes = budget_above_resident(GPT2, share)
    proposal = auto(GPT2, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
    simulation = simulate(GPT2, proposal.schedule)
    assert simulation.peak_bytes <= budget_bytes
    assert 100 * overhead(GPT2, simulation.time_s) == pytest.approx(percent, abs=0.006)
    assert 100 * overhead(GPT2, proposal.lower_bound_s) == pytest.approx(percent, abs=0.006)


def test_gpt2_in_half_is_proven_infeasible() -> None:
    budget_bytes = budget_above_resident(GPT2, 0.5)
    proposal = auto(GPT2, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
    assert proposal.schedule is None
    assert proposal.lower_bound_s == math.inf


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("share", [0.7, 0.9])
def test_gap_closes_at_generous_budgets(name: str, share: float) -> None:
    graph = NETS[name]
    proposal = auto(
        graph, budget_bytes=budget_above_least(graph, share), time_limit_s=600.0, seed=0
    )
    time_s = simulate(graph, proposal.schedule).time_s
    assert overhead(graph, time_s) - overhead(graph, proposal.lower_bound_s) <= 1e-3


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", ["chain", "transformer", "u_shape"])
def test_never_worse_than_the_others(name: str) -> None:
    graph = NETS[name]
    for share in (0.5, 0.15):
        options = {
            "budget_bytes": budget_above_least(graph, share),
            "time_limit_s": 60.0,
            "seed": 0,
        }
        ours = auto(graph, **options)
        for other in set(METHODS) - {"auto", "ilp"}:
            theirs = METHODS[other](graph, **options)
            if theirs.schedule is None:
                continue
            theirs_s = simulate(graph, theirs.schedule).time_s
            ours_s = simulate(graph, ours.schedule).time_s
            assert ours_s <= theirs_s + DONE_GAP * graph.baseline_time_s
            assert ours.lower_bound_s <= theirs_s


@pytest.mark.slow
def test_order_in_the_budget() -> None:
    for name in ("transformer", "u_shape"):
        graph = NETS[name]
        times: list[float] = []
        gaps: list[float] = []
        for share in (1.0, 0.8, 0.6, 0.4):
            proposal = auto(
                graph, budget_bytes=budget_above_least(graph, share), time_limit_s=600.0, seed=0
            )
            times.append(simulate(graph, proposal.schedule).time_s)
            gaps.append(times[-1] - proposal.lower_bound_s)
        assert times[0] == pytest.approx(graph.baseline_time_s)
        # More bytes never cost more time, but for the gap that the call itself reports.
        assert all(
            more <= less + gap + DONE_GAP * graph.baseline_time_s
            for more, less, gap in zip(times, times[1:], gaps, strict=False)
        )


@pytest.mark.slow
def test_same_schedule_twice() -> None:
    graph = NETS["u_shape"]
    options = {"budget_bytes": budget_above_least(graph, 0.25), "time_limit_s": 600.0, "seed": 3}
    assert auto(graph, **options) == auto(graph, **options)


def test_no_time_gives_the_best_so_far() -> None:
    graph = NETS["pyramid"]
    proposal = auto(graph, budget_bytes=budget_above_least(graph, 0.3), time_limit_s=0.0, seed=0)
    assert proposal.timed_out
    full = auto(GPT2, budget_bytes=10**11, time_limit_s=0.0, seed=0)
    assert full.schedule is not None


@pytest.mark.parametrize("name", NETS)
def test_eviction_stays_within_the_budget_and_improvement_never_harms(name: str) -> None:
    graph = NETS[name]
    folded = StorageGraph.of(graph)
    for share in (0.7, 0.4, 0.2):
        budget_bytes = budget_above_least(graph, share)
        schedule = evict(folded, budget_bytes=budget_bytes)[0]
        before = simulate(graph, schedule)
        after = simulate(graph, drop_recomputation(folded, schedule, budget_bytes=budget_bytes))
        assert before.peak_bytes <= budget_bytes
        assert after.peak_bytes <= budget_bytes
        assert after.time_s <= before.time_s


def test_the_answer_is_a_local_optimum_even_where_the_search_ends_near_the_bound():
    graph = NETS["u_shape"]
    budget_bytes = budget_above_resident(graph, 0.75)
    found = auto(graph, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
    folded = StorageGraph.of(graph)
    again = drop_recomputation(folded, found.schedule, budget_bytes=budget_bytes)
    assert again == found.schedule
