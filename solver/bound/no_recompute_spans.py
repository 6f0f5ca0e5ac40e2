"""Spans of a step in which a forward node cannot be recomputed by any schedule.

A storage cannot be recomputed while an alias still holds the old one. If the alias is made by a
node that runs only once (a view or an in-place overwrite in the backward pass), it cannot be freed
before its last use. Until then the node that made the storage cannot be recomputed, and neither can
its other outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphs.graph import Graph, Node


@dataclass(frozen=True)
class NoRecomputeSpan:
    """A forward node, and the part of the step in which it cannot be recomputed.

    maker: the node's position.
    root: the output of the node that has the alias.
    first: position of the node that makes the alias.
    last: position of the alias's last use (n_nodes: the end of the step).

    The node is not recomputed between the first runs of the nodes at `first` and `last`.
    """

    maker: int
    root: str
    first: int
    last: int


def find_no_recompute_spans(graph: Graph) -> Iterator[NoRecomputeSpan]:
    """Yield the spans of those nodes that can be recomputed elsewhere in the step."""
    position = {node.name: p for p, node in enumerate(graph.nodes)}
    outputs = set(graph.outputs)
    for root, aliases in graph.views.items():
        for alias in aliases:
            once, maker = graph.producer[alias], graph.producer.get(root)
            if maker is None or maker is once or may_run_again(once) or not may_run_again(maker):
                continue
            last = max((position[node.name] for node in graph.consumers[alias]), default=-1)
            last = len(graph.nodes) if alias in outputs else last
            if last > position[once.name]:
                yield NoRecomputeSpan(position[maker.name], root, position[once.name], last)


def may_run_again(node: Node) -> bool:
    return node.phase == "forward" and node.recomputable
