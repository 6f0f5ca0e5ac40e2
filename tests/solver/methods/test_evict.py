"""Greedy eviction where it used to get stuck: what is dead stays, what is needed comes too late."""

import pytest

from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.methods import find_obstacle
from solver.methods.early_recompute import Gate, gates_for
from solver.methods.evict import evict
from solver.schedule import simulate
from tests.support.brute_force import least_peak_bytes
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import random_dag


def wide_blocks() -> Graph:
    """Two blocks with a wide middle. At the loss nothing of the forward pass can stay; beside the
    wide gradient of block 2 (w2), block 1 cannot be computed again.
    """
    return make(
        [
            op("up1", "x", "m1"),
            op("down1", "m1", "h1"),
            op("up2", "h1", "m2"),
            op("down2", "m2", "h2"),
            op("loss", "h2", "g2", workspace_bytes=19, phase="backward"),
            op("widen2", "g2", "w2", phase="backward"),
            op("narrow2", "w2 m2", "g1", phase="backward"),
            op("widen1", "g1", "w1", phase="backward"),
            op("narrow1", "w1 m1", "g0", phase="backward"),
        ],
        {
            "x": 1,
            "m1": 12,
            "h1": 1,
            "m2": 10,
            "h2": 1,
            "g2": 1,
            "w2": 10,
            "g1": 1,
            "w1": 5,
            "g0": 1,
        },
        outputs="g0",
    )


def test_made_ahead_of_time_where_just_in_time_has_no_room() -> None:
    graph = wide_blocks()
    folded = StorageGraph.of(graph)
    least_bytes = least_peak_bytes(graph)
    h1, since, until = folded.unit_names.index("h1"), 5, 6  # widen2, narrow2
    gates = gates_for(folded, until, budget_bytes=least_bytes)
    assert Gate(h1, since, until) in list(gates)
    schedule, _ = evict(folded, budget_bytes=least_bytes)
    assert simulate(graph, schedule).peak_bytes == least_bytes
    assert find_obstacle(graph).reached_bytes == least_bytes


def test_nothing_is_made_ahead_where_there_is_room() -> None:
    folded = StorageGraph.of(wide_blocks())
    for q in range(folded.n_nodes + 1):
        assert not list(gates_for(folded, q, budget_bytes=100))


def test_what_runs_once_goes_after_its_last_use() -> None:
    graph = make(
        [
            op("f", "x", "h"),
            op("head", "h", "z", recomputable=False),
            op("loss", "z", "g", phase="backward"),
            op("b", "g h", "g0", workspace_bytes=9, phase="backward"),
        ],
        {"x": 1, "h": 1, "z": 10, "g": 1, "g0": 1},
        outputs="g0",
    )
    schedule, _ = evict(StorageGraph.of(graph), budget_bytes=13)
    assert simulate(graph, schedule).peak_bytes == least_peak_bytes(graph) == 13


@pytest.mark.slow
def test_the_least_budget_of_all() -> None:
    """Nothing is found below it; at it, one run finds five schedules of six."""
    n_found, n_graphs = 0, 60
    for seed in range(n_graphs):
        graph = random_dag(seed=seed, n_forward=6, n_later=4)
        least_bytes = least_peak_bytes(graph)
        folded = StorageGraph.of(graph)
        assert evict(folded, budget_bytes=least_bytes - 1)[0] is None
        schedule, _ = evict(folded, budget_bytes=least_bytes)
        if schedule is not None:
            assert simulate(graph, schedule).peak_bytes == least_bytes
            n_found += 1
    assert n_found >= 50
