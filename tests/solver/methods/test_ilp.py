"""The integer program equals the truth on tiny graphs, and refuses large ones."""

import importlib.util
import math
import random

import pytest

from graphs.graph import Graph, Node, Tensor
from solver.bound import StorageGraph
from solver.methods.ilp import ilp, solve_stages
from solver.methods.ilp_variables import Stages, TooLargeError
from solver.schedule.ops import Schedule
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import Deadline
from solver.solving import solve
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.budgets import budget_above_resident
from tests.support.synthetic_graphs import chain, random_dag, residual


def solve_once(graph: Graph, *, budget_bytes: int, n_sweeps: int = 1) -> Schedule | None:
    stages = Stages(StorageGraph.of(graph), budget_bytes=budget_bytes, n_sweeps=n_sweeps)
    schedule, _ = solve_stages(stages, deadline=Deadline.after(600))
    return schedule


def tiny(seed: int) -> Graph:
    rng = random.Random(seed)
    return random_dag(seed=seed, n_forward=rng.randint(2, 6), n_later=rng.randint(1, 4))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("seed", range(0, 80, 10))
def test_equals_the_truth(seed: int) -> None:
    for graph in map(tiny, range(seed, seed + 10)):
        least_bytes = least_peak_bytes(graph)
        for budget_bytes in (least_bytes - 1, least_bytes, least_bytes + 2):
            truth = fastest(graph, budget_bytes=budget_bytes)
            proposal = ilp(graph, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
            assert proposal.lower_bound_s <= truth.time_s + 1e-9
            if truth.ops is None:
                assert proposal.schedule is None
                continue
            simulation = simulate(graph, proposal.schedule)
            assert simulation.peak_bytes <= budget_bytes
            assert simulation.time_s == pytest.approx(truth.time_s, abs=1e-9)


def test_needs_two_sweeps_where_the_graph_order_is_the_wrong_one() -> None:
    """Two chains from memory-hungry to small; the end needs both, the second must come first."""
    graph = wrong_order()
    truth = fastest(graph, budget_bytes=10)
    assert solve_once(graph, budget_bytes=10, n_sweeps=1) is None
    two = solve_once(graph, budget_bytes=10, n_sweeps=2)
    assert simulate(graph, two).time_s == pytest.approx(truth.time_s)
    proposal = ilp(graph, budget_bytes=10, time_limit_s=600.0, seed=0)
    assert simulate(graph, proposal.schedule).time_s == pytest.approx(truth.time_s)


def wrong_order() -> Graph:
    """Before `end`, a2 (4 bytes, by way of a1) and b2 (1 byte, by way of b1) are made again."""
    return Graph(
        nodes=(
            Node("fa1", "op", (), ("a1",), 1.0),
            Node("fa2", "op", ("a1",), ("a2",), 1.0),
            Node("fb1", "op", (), ("b1",), 1.0),
            Node("fb2", "op", ("b1",), ("b2",), 1.0),
            Node("full", "op", (), ("g",), 1.0, 9, phase="backward", recomputable=False),
            Node("end", "op", ("a2", "b2", "g"), ("h",), 1.0, phase="backward", recomputable=False),
        ),
        tensors=(
            Tensor("a1", 3),
            Tensor("a2", 4),
            Tensor("b1", 8),
            Tensor("b2", 1),
            Tensor("g", 1),
            Tensor("h", 1),
        ),
        outputs=("h",),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "share"),
    [(chain(n_blocks=8), 0.7), (residual(n_blocks=1), 0.8)],
    ids=["chain", "residual"],
)
def test_program_meets_the_bound_on_every_schedule(graph: Graph, share: float) -> None:
    budget_bytes = budget_above_resident(graph, share)
    schedule = solve_once(graph, budget_bytes=budget_bytes)
    simulation = simulate(graph, schedule)
    bound_s = ilp(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0).lower_bound_s
    assert simulation.time_s >= bound_s >= simulation.time_s * (1 - 1e-4)
    assert simulation.peak_bytes <= budget_bytes


def test_cbc_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for graph in map(tiny, range(5)):
        budget_bytes = least_peak_bytes(graph)
        truth = fastest(graph, budget_bytes=budget_bytes)
        schedule = solve_once(graph, budget_bytes=budget_bytes)
        assert simulate(graph, schedule).time_s == pytest.approx(truth.time_s)


def test_nothing_fits() -> None:
    graph = chain(n_blocks=4)
    proposal = ilp(graph, budget_bytes=graph.resident_bytes, time_limit_s=600, seed=0)
    assert proposal.schedule is None
    assert proposal.lower_bound_s == math.inf


def test_refuses_large_graphs_by_their_size() -> None:
    graph = chain(n_blocks=120)
    with pytest.raises(TooLargeError, match=r"242 nodes would have \d+ variables, more than 20000"):
        ilp(graph, budget_bytes=60_000, time_limit_s=600, seed=0)


def test_a_budget_below_the_least_is_infeasible_where_larger_ones_are_refused() -> None:
    graph = chain(n_blocks=120)
    solution = solve(graph, budget=graph.resident_bytes + 1, method="ilp")
    assert solution.status == "infeasible"
    assert solution.obstacle is not None
    assert solution.obstacle.reached_bytes == solution.baseline.peak_bytes
