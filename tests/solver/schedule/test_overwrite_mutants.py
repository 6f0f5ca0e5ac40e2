"""Schedules in which a node overwrites what is still to be read: both simulators refuse each."""

from __future__ import annotations

from collections.abc import Iterator

from graphs.graph import Graph, Node
from solver.schedule import Compute, Op, Schedule, baseline
from tests.support.overwriting import overwriting_dag
from tests.support.plain_simulator import assert_simulators_agree


def overwrites() -> Iterator[tuple[Graph, list[Op], Node, int]]:
    """Graph, ops of its baseline, and a node that overwrites a storage, with its position."""
    for seed in range(200):
        graph = overwriting_dag(seed)
        assert assert_simulators_agree(graph, baseline(graph))
        ops = list(baseline(graph).ops)
        for node in graph.nodes:
            if node.overwrites is not None:
                yield graph, ops, node, ops.index(Compute(node.name))


def readers(graph: Graph, node: Node) -> set[str]:
    """The earlier nodes that read the storage that this one overwrites."""
    root, earlier = graph.root(node.overwrites), graph.nodes[: graph.nodes.index(node)]
    return {each.name for each in earlier if root in map(graph.root, each.inputs)}


def is_legal(graph: Graph, ops: list[Op]) -> bool:
    return assert_simulators_agree(graph, Schedule(tuple(ops), graph.graph_id))


def test_an_overwrite_before_what_still_reads_its_input() -> None:
    n_mutants = 0
    for graph, ops, node, at in overwrites():
        reading = readers(graph, node)
        for i, op in enumerate(ops[:at]):
            if isinstance(op, Compute) and op.node in reading:
                n_mutants += 1
                assert not is_legal(graph, [*ops[:i], ops[at], *ops[i:at], *ops[at + 1 :]])
    assert n_mutants > 100


def test_a_read_after_the_overwrite() -> None:
    """What read the storage before is run again after it was overwritten."""
    n_mutants = 0
    for graph, ops, node, at in overwrites():
        for name in readers(graph, node):
            n_mutants += 1
            assert not is_legal(graph, [*ops[: at + 1], Compute(name), *ops[at + 1 :]])
    assert n_mutants > 100
