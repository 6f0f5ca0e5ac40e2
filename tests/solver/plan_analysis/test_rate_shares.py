"""The range of an overhead, by the ratio of the rates that kernels reach."""

from __future__ import annotations

import dataclasses
import random

import pytest

from graphs.graph import Graph, Node
from solver import solve
from solver.plan_analysis import LARGEST_RATIO, LEAST_RATIO, overhead_range
from solver.schedule import Compute, Solution
from tests.support.paths import GPT2

ON_A_CARD = {"model": "roofline", "device": "h100"}


def graph(costs: dict[str, str], seed: int = 0) -> Graph:
    """GPT-2 with these costs, and the times of its operators shuffled."""
    loaded = Graph.load(GPT2)
    times = [node.time_s for node in loaded.nodes]
    if seed:
        random.Random(seed).shuffle(times)
    nodes = tuple(
        dataclasses.replace(n, time_s=t) for n, t in zip(loaded.nodes, times, strict=True)
    )
    return dataclasses.replace(
        loaded, nodes=nodes, meta=dataclasses.replace(loaded.meta, costs=costs)
    )


def at_ratio(solution: Solution, ratio: float) -> float:
    """The overhead where each operator that is no product takes so many times as long."""

    def seconds(node: Node) -> float:
        is_product = node.op.split(".")[1] in ("mm", "addmm", "bmm") or "attention" in node.op
        return node.time_s * (1.0 if is_product else ratio)

    nodes = solution.graph.node_by_name
    ran = sum(seconds(nodes[op.node]) for op in solution.schedule.ops if isinstance(op, Compute))
    return ran / sum(map(seconds, solution.graph.nodes)) - 1.0


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("seed", range(3))
def test_the_range_is_that_of_all_ratios(seed):
    solution = solve(graph(ON_A_CARD, seed), budget="5GB", method="sqrt")
    low, high = overhead_range(solution)
    assert at_ratio(solution, 1.0) == pytest.approx(solution.overhead)
    steps = [LEAST_RATIO + k * (LARGEST_RATIO - LEAST_RATIO) / 20 for k in range(21)]
    found = [at_ratio(solution, ratio) for ratio in steps]
    assert (min(found), max(found)) == pytest.approx((low, high))
    assert low <= solution.overhead <= high


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    "costs", [{"model": "measured", "device": "cuda"}, {"model": "roofline", "device": "cpu"}, {}]
)
def test_other_costs_have_no_range(costs):
    assert overhead_range(solve(graph(costs), budget="5GB", method="sqrt")) is None


@pytest.mark.slow
def test_no_plan_has_no_range():
    assert overhead_range(solve(graph(ON_A_CARD), budget="1GB", method="sqrt")) is None
