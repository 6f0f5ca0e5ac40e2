"""Spans of a step in which a forward node cannot be recomputed, whatever is decided.

A storage is not recomputed while an alias holds the old one. The alias of a node that runs only
once (a view or an overwrite in the backward pass) cannot be freed before its last use, so up to
there the node that made the storage stays as it is, with all its other outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphs.graph import Graph, Node


@dataclass(frozen=True)
class NoRecomputeSpan:
    """maker, root: the node, by position, and its output with the alias.

    first, last: positions of the node that makes the alias and of its last use (n_nodes: the end).
    The node is not recomputed between the first runs of these two.
    """

    maker: int
    root: str
    first: int
    last: int


def find_no_recompute_spans(graph: Graph) -> Iterator[NoRecomputeSpan]:
    """The spans of nodes that may be recomputed elsewhere."""
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
