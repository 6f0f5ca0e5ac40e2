"""Blocks that only update buffers are no rows of a table."""

from __future__ import annotations

import pytest

from graphs.graph import Graph
from solver.chain import computing_blocks, split_into_blocks
from solver.plan_analysis.by_block import block_names, block_rows
from solver.solving import solve
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import random_dag


def with_batch_norm(n_layers: int) -> Graph:
    """Convolution, the count of calls, norm, and at the end what updates the buffers."""
    nodes, sizes, x = [], {"x": 100, "count": 1}, "x"
    for i in range(n_layers):
        nodes += [
            op(f"conv{i}", x, f"c{i}"),
            op(f"count{i}", "count", f"n{i}"),
            op(f"norm{i}", f"c{i}", f"y{i} m{i}"),
        ]
        sizes |= {f"c{i}": 100, f"n{i}": 1, f"y{i}": 100, f"m{i}": 4}
        x = f"y{i}"
    nodes.append(op("loss", x, "l"))
    sizes["l"] = 1
    for i in range(n_layers):
        nodes += [op(f"copy_n{i}", f"n{i}", ""), op(f"copy_m{i}", f"m{i}", "")]
    gradient = "l"
    for i in reversed(range(n_layers)):
        nodes.append(op(f"back{i}", f"c{i} {gradient}", f"g{i}", phase="backward"))
        sizes[f"g{i}"] = 100
        gradient = f"g{i}"
    return make(nodes, sizes, outputs=gradient)


@pytest.mark.parametrize("n_layers", [1, 3, 6])
def test_no_block_is_bookkeeping_alone(n_layers: int) -> None:
    graph = with_batch_norm(n_layers)
    shown = computing_blocks(graph)
    computing = {n.name for n in graph.forward_nodes if n.name.startswith(("conv", "norm", "loss"))}
    assert all(computing & set(names) for names in shown.forward)
    cut = split_into_blocks(graph)
    assert any(not computing & set(names) for names in cut.forward)  # for the methods they are
    for one, other in ((shown.forward, cut.forward), (shown.backward, cut.backward)):
        assert sorted(sum(one, ())) == sorted(sum(other, ()))
    assert sum(shown.forward, ()) == tuple(node.name for node in graph.forward_nodes)
    assert set(shown.crossing) <= set(cut.crossing)
    assert len(shown.crossing) == shown.n_blocks + 1 == len(shown.backward)


def test_the_backward_segments_stay_in_order() -> None:
    graph = with_batch_norm(4)
    order = [node.name for node in graph.later_nodes]
    for names in computing_blocks(graph).backward:
        assert [order.index(name) for name in names] == sorted(order.index(name) for name in names)


def test_bookkeeping_at_the_start_is_part_of_the_first_block() -> None:
    graph = with_batch_norm(3)
    first = [op("count", "count", "n"), op("copy_n", "n", "")]
    sizes = {t.name: t.size_bytes for t in graph.tensors} | {"n": 1}
    moved = make([*first, *graph.nodes], sizes, outputs=graph.outputs[0])
    names = computing_blocks(moved).forward
    assert names[0][:3] == ("count", "copy_n", "conv0")


@pytest.mark.slow(sample=20)
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_in_random_graphs(seed: int) -> None:
    graph = random_dag(seed=seed, n_forward=9, n_later=5)
    shown, cut = computing_blocks(graph), split_into_blocks(graph)
    assert sum(shown.forward, ()) == sum(cut.forward, ())
    assert sorted(sum(shown.backward, ())) == sorted(sum(cut.backward, ()))
    assert shown.n_blocks <= cut.n_blocks


def test_the_rows_are_those_of_the_blocks_that_compute() -> None:
    graph = with_batch_norm(5)
    rows = block_rows(solve(graph, budget=10_000))
    assert len(rows) == computing_blocks(graph).n_blocks == len(block_names(graph))
