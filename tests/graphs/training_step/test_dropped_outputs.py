"""Bounds and plans of steps whose caller drops an output, below and at the truth."""

import dataclasses
import random

import pytest

from graphs.graph import Graph
from graphs.training_step import with_dropped_outputs
from solver.bound.lower_bound import lower_bound_s, proven_least_budget_bytes
from solver.bound.storage_graph import StorageGraph
from solver.schedule import Request
from solver.solving import answer
from tests.support.brute_force import fastest, least_peak_bytes
from tests.support.budgets import baseline_peak_bytes
from tests.support.synthetic_graphs import random_dag


def returning(seed: int) -> tuple[Graph, str]:
    """A graph that returns this tensor of its forward pass; what is returned is computed once."""
    rng = random.Random(seed)
    graph = random_dag(seed=seed, n_forward=rng.randint(2, 6), n_later=rng.randint(1, 4))
    output = rng.choice([name for node in graph.forward_nodes for name in node.outputs])
    outputs = tuple(dict.fromkeys((output, *graph.outputs)))
    nodes = tuple(
        dataclasses.replace(
            node, recomputable=node.recomputable and not set(outputs).intersection(node.outputs)
        )
        for node in graph.nodes
    )
    return dataclasses.replace(graph, nodes=nodes, outputs=outputs), output


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_the_plan_is_the_fastest(seed: int) -> None:
    for held, output in map(returning, range(seed, seed + 20)):
        graph = with_dropped_outputs(held, [output])
        least_bytes = least_peak_bytes(graph)
        proven_bytes, _ = proven_least_budget_bytes(StorageGraph.of(graph))
        assert proven_bytes <= least_bytes <= least_peak_bytes(held)
        peak_bytes = baseline_peak_bytes(graph)
        for budget_bytes in {least_bytes, (least_bytes + peak_bytes) // 2}:
            truth = fastest(graph, budget_bytes=budget_bytes)
            assert lower_bound_s(graph, budget_bytes=budget_bytes) <= truth.time_s + 1e-9
            found = answer(graph, Request(budget_bytes=budget_bytes)).simulation
            assert found.time_s == pytest.approx(truth.time_s)
            assert found.peak_bytes <= budget_bytes
