"""Schedules in which a node overwrites what is still to be read: both simulators refuse each."""

from __future__ import annotations

from graphs.graph import Graph
from solver.schedule import Compute, Op, Schedule, baseline
from tests.support.overwriting import overwriting_dag
from tests.support.plain_simulator import assert_simulators_agree


def refused(graph: Graph, ops: list[Op]) -> None:
    assert not assert_simulators_agree(graph, Schedule(tuple(ops), graph.graph_id))


def test_an_overwrite_before_what_still_reads_its_input() -> None:
    n_mutants = 0
    for seed in range(200):
        graph = overwriting_dag(seed)
        ops = list(baseline(graph).ops)
        assert assert_simulators_agree(graph, baseline(graph))
        for node in graph.nodes:
            if node.overwrites is None:
                continue
            root, at = graph.root(node.overwrites), ops.index(Compute(node.name))
            for i, op in enumerate(ops[:at]):
                reads = isinstance(op, Compute) and root in map(
                    graph.root, graph.node_by_name[op.node].inputs
                )
                if reads:
                    n_mutants += 1
                    refused(graph, [*ops[:i], ops[at], *ops[i:at], *ops[at + 1 :]])
    assert n_mutants > 100


def test_a_read_after_the_overwrite() -> None:
    """What read the storage before is run again after it was overwritten."""
    n_mutants = 0
    for seed in range(200):
        graph = overwriting_dag(seed)
        ops = list(baseline(graph).ops)
        for node in graph.nodes:
            if node.overwrites is None:
                continue
            root, at = graph.root(node.overwrites), ops.index(Compute(node.name))
            for other in graph.nodes[: graph.nodes.index(node)]:
                if root in map(graph.root, other.inputs):
                    n_mutants += 1
                    refused(graph, [*ops[: at + 1], Compute(other.name), *ops[at + 1 :]])
    assert n_mutants > 100
