"""Replays of reversals: legal, within the budget, and better than what fits as it is."""

import random

import pytest

from graphs.synthetic import nets
from solver.bound import StorageGraph
from solver.chain import split_into_blocks
from solver.methods.auto.replay import replay_within
from solver.methods.auto_method import auto
from solver.methods.revolve import reversal_to_schedule, revolve
from solver.schedule import baseline, simulate
from tests.support.synthetic_graphs import random_dag

MAX_WORK = 10**7


def test_a_replayed_reversal_beats_the_one_that_fits() -> None:
    graph = nets.recurrent(n_steps=60)
    folded, blocks = StorageGraph.of(graph), split_into_blocks(graph)
    fitting, larger = (reversal_to_schedule(graph, blocks, n) for n in (3, 4))
    budget_bytes = simulate(graph, fitting).peak_bytes
    assert simulate(graph, larger).peak_bytes > budget_bytes
    found, _ = replay_within(folded, larger.order, budget_bytes=budget_bytes, max_work=MAX_WORK)
    simulation = simulate(graph, found)
    assert simulation.peak_bytes <= budget_bytes
    assert simulation.time_s < simulate(graph, fitting).time_s


@pytest.mark.slow
def test_auto_proves_and_finds_more_near_the_least_budget_of_a_deep_chain() -> None:
    graph = nets.recurrent(n_steps=60)
    budget_bytes = simulate(
        graph, reversal_to_schedule(graph, split_into_blocks(graph), 3)
    ).peak_bytes
    limits = {"budget_bytes": budget_bytes, "time_limit_s": 600.0, "seed": 0}
    by_revolve = revolve(graph, **limits).schedule
    found = auto(graph, **limits)
    time_s = simulate(graph, found.schedule).time_s
    assert time_s < simulate(graph, by_revolve).time_s
    # Cuts see one forward pass, a third of the step, recomputed.
    assert 1.5 * graph.baseline_time_s < found.lower_bound_s <= time_s


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("seed", range(0, 600, 60))
def test_replays_of_any_order_fit_where_they_end(seed: int) -> None:
    n_found = 0
    for number in range(seed, seed + 60):
        rng = random.Random(number)
        graph = random_dag(seed=number, n_forward=rng.randint(4, 9), n_later=rng.randint(2, 6))
        folded = StorageGraph.of(graph)
        plain = baseline(graph)
        peak_bytes = simulate(graph, plain).peak_bytes
        least_bytes = int(folded.least_bytes.max())
        budget_bytes = rng.randint(least_bytes, peak_bytes)
        found, _ = replay_within(folded, plain.order, budget_bytes=budget_bytes, max_work=MAX_WORK)
        if found is None or any(tensor.alias_of for tensor in graph.tensors):
            continue  # the replay knows storages, not views: there the simulator has the last word
        assert simulate(graph, found).peak_bytes <= budget_bytes
        n_found += 1
    assert n_found > 3
