"""The chain problems' answers on graphs: as many recomputations as the theory says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from graphs.graph import Graph
from graphs.synthetic import nets
from solver.chain.binomial import n_extra_steps
from solver.chain.blocks import split_into_blocks
from solver.chain.from_graph import constant_bytes, to_chain
from solver.chain.rotor import solve_chain
from solver.chain.to_schedule import chain_to_schedule
from solver.methods.auto_method import auto
from solver.methods.dp import dp
from solver.methods.every_block import every_block
from solver.methods.least_budget import find_obstacle
from solver.methods.proposal import Proposal
from solver.methods.revolve import reversal_to_schedule, revolve
from solver.methods.sqrt import sqrt
from solver.schedule.simulator import Simulation, simulate
from tests.support.brute_force import fastest
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.small_graphs import uniform_chain


@pytest.mark.parametrize("n_blocks", [1, 2, 5, 10, 33])
@pytest.mark.parametrize("n_snapshots", [1, 2, 3, 7, 40])
def test_reversal_of_a_uniform_chain_takes_the_fewest_steps(
    n_blocks: int, n_snapshots: int
) -> None:
    """b_i reads x_{i-1} alone, so nothing is recomputed but to get there.

    Of the steps that save nothing n - 1 are first runs.
    """
    graph = uniform_chain(n_blocks)
    simulation = simulate(graph, reversal_to_schedule(graph, split_into_blocks(graph), n_snapshots))
    extra = n_extra_steps(n_steps=n_blocks, n_snapshots=n_snapshots)
    assert simulation.n_recomputed == extra - (n_blocks - 1)
    # snapshots (x_0 is one), the state, the next one, two gradients; at most all states at the loss
    assert simulation.peak_bytes <= min(n_snapshots + 3, n_blocks + 2)


def test_fewer_snapshots_take_less_memory_and_more_time() -> None:
    graph = uniform_chain(30)
    blocks = split_into_blocks(graph)
    traces = [simulate(graph, reversal_to_schedule(graph, blocks, n)) for n in range(1, 31)]
    assert all(few.time_s >= many.time_s for few, many in pairwise(traces))
    assert all(few.peak_bytes <= many.peak_bytes for few, many in pairwise(traces))


def test_revolve_reaches_budgets_that_running_once_more_cannot() -> None:
    graph = nets.chain(n_blocks=40)
    budget_bytes = 7000
    proposal = revolve(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0)
    simulation = simulate(graph, proposal.schedule)
    assert simulation.peak_bytes <= budget_bytes
    assert simulation.n_recomputed > 2 * 41


def simulated(graph: Graph, proposal: Proposal) -> Simulation | None:
    return simulate(graph, proposal.schedule) if proposal.schedule else None


def strict_chain(n_blocks: int) -> Graph:
    """A uniform chain whose backward nodes read their block's output too, as the model has it."""
    graph = uniform_chain(n_blocks)
    nodes = [
        replace(node, inputs=(*node.inputs, f"x{node.name[1:]}")) if node.name[0] == "b" else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("budget_bytes", range(3, 10))
def test_dp_finds_the_truth_on_a_uniform_chain(budget_bytes: int) -> None:
    """Of six blocks: no schedule at all is faster (by exhaustion over every state)."""
    graph = strict_chain(6)
    truth = fastest(graph, budget_bytes=budget_bytes)
    simulation = simulated(graph, dp(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0))
    if simulation is None:
        assert truth.ops is None
    else:
        assert simulation.time_s == truth.time_s


@pytest.mark.slow
def test_dp_on_a_chain_is_never_worse_than_the_rules_of_thumb() -> None:
    for graph in (nets.chain(n_blocks=30), nets.residual(n_blocks=10)):
        peak_bytes = baseline_peak_bytes(graph)
        for part in (0.9, 0.7, 0.5, 0.3):
            budget_bytes = int(part * peak_bytes)
            best = simulated(graph, dp(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0))
            for method in (every_block, sqrt, revolve):
                other = method(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0)
                simulation = simulated(graph, other)
                assert simulation is None or (
                    best is not None and best.time_s <= simulation.time_s + 1e-9
                )


@pytest.mark.slow
def test_auto_is_no_slower_on_a_deep_chain_than_its_best_blocks() -> None:
    graph = nets.residual(n_blocks=60)
    budget_bytes = budget_above_resident(graph, 0.2)
    options = {"budget_bytes": budget_bytes, "time_limit_s": 600, "seed": 0}
    ours, blocks = (simulated(graph, method(graph, **options)) for method in (auto, dp))
    assert ours.peak_bytes <= budget_bytes
    assert ours.time_s <= blocks.time_s


@pytest.mark.parametrize("part", [0.9, 0.6, 0.4])
def test_the_chain_counts_as_the_simulator_does_on_a_uniform_chain(part: float) -> None:
    graph = nets.chain(n_blocks=20)
    blocks = split_into_blocks(graph)
    chain_bytes = int(part * baseline_peak_bytes(graph)) - constant_bytes(graph, blocks)
    solution = solve_chain(to_chain(graph, blocks), budget_bytes=chain_bytes)
    simulation = simulate(graph, chain_to_schedule(graph, blocks, solution.ops))
    slack = solution.peak_bytes + constant_bytes(graph, blocks) - simulation.peak_bytes
    assert 0 <= slack <= 1010  # at most one tensor: the output that a backward pass may not need
    assert simulation.time_s <= solution.cost_s


@pytest.mark.slow
def test_dp_fits_blocks_to_the_room_that_gradients_leave() -> None:
    """Gradients of parameters take more and more of the room. No equal blocks fit, and `revolve`
    has as few snapshots at first as at the end: 149 %, where `dp` loses 54 %."""
    graph = nets.residual(n_blocks=100)
    budget_bytes = find_obstacle(graph).reached_bytes + 3 * 2**20
    best, reversal = (
        simulated(graph, method(graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0))
        for method in (dp, revolve)
    )
    assert best is not None
    assert reversal is not None
    assert best.peak_bytes <= budget_bytes
    lost_s, lost_by_reversal_s = (each.time_s - graph.baseline_time_s for each in (best, reversal))
    assert lost_s < 0.5 * lost_by_reversal_s
