"""The table of blocks: every row is counted by hand or by the simulator."""

from __future__ import annotations

import dataclasses
from itertools import cycle

import pytest

from graphs.graph import Graph
from graphs.synthetic.nets import residual
from solver.chain.blocks import split_into_blocks
from solver.plan_analysis.by_block import block_rows
from solver.schedule.memory import saved_for_backward
from solver.schedule.recompute import baseline
from solver.solving import solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.paths import GPT2
from tests.support.small_graphs import uniform_chain


@pytest.mark.parametrize("graph", [residual(n_blocks=6), Graph.load(GPT2)], ids=["res", "gpt"])
@pytest.mark.parametrize("method", ["auto", "every_block"])
def test_the_rows_add_up_to_the_plan(graph, method):
    solution = solve(
        graph, budget=int(0.8 * baseline_peak_bytes(graph)), method=method, time_limit_s=600
    )
    rows = block_rows(solution)
    assert [row.block for row in rows] == list(range(1, split_into_blocks(graph).n_blocks + 1))
    assert sum(row.n_ops for row in rows) == len(graph.forward_nodes)
    assert sum(row.n_recomputed for row in rows) == solution.simulation.n_recomputed > 0
    lost_s = solution.simulation.time_s - solution.baseline.time_s
    assert sum(row.recompute_s for row in rows) == pytest.approx(lost_s)
    sizes = {name: graph.tensor_by_name[name].size_bytes for name in graph.producer}
    kept = sum(sizes[name] for name in saved_for_backward(graph, solution.schedule))
    plain = sum(sizes[name] for name in saved_for_backward(graph, baseline(graph)))
    assert sum(row.kept_bytes for row in rows) == kept
    assert sum(row.kept_bytes + row.dropped_bytes for row in rows) == plain
    assert any(row.dropped_bytes for row in rows)


def test_a_chain_by_hand():
    """Of six equal tensors, two are dropped and made again once."""
    graph = uniform_chain(6, unit_bytes=10)
    solution = solve(graph, budget=int(0.75 * baseline_peak_bytes(graph)), time_limit_s=600)
    rows = block_rows(solution)
    assert {row.kept_bytes + row.dropped_bytes for row in rows} == {10}
    assert all(row.forward_s == row.n_ops == 1 for row in rows)
    assert {row.n_recomputed for row in rows if row.kept_bytes} == {0}
    assert all(row.recompute_s == row.n_recomputed for row in rows)


@pytest.mark.parametrize(
    ("modules", "shared"),
    [
        (["a.1.f", "a.1", "a.1.g.h"], "a.1"),
        (["a.1.f", "", "a.1.f"], "a.1.f"),
        (["", "", ""], ""),
        (["norm", "head.up", "norm"], "norm … head.up"),
    ],
)
def test_the_module_of_a_block_is_what_its_ops_share(modules, shared):
    graph = residual(n_blocks=1)
    inner = split_into_blocks(graph).forward[1]
    assert len(inner) == 5
    module_of = dict(zip(inner, cycle(modules), strict=False))
    nodes = tuple(dataclasses.replace(n, module=module_of.get(n.name, "")) for n in graph.nodes)
    whole = dataclasses.replace(graph, nodes=nodes)
    rows = block_rows(solve(whole, budget=baseline_peak_bytes(whole)))
    assert [row.module for row in rows] == ["", shared, ""]


def test_no_rows_without_a_schedule():
    graph = residual(n_blocks=3)
    assert (
        block_rows(solve(graph, budget=int(0.9 * baseline_peak_bytes(graph)), method="none")) == ()
    )
