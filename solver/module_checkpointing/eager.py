"""What eager mode does to a traced step that its graph alone does not say.

A graph is functional and made of single operators. Eager mode runs some of them in place, and its
backward pass runs whole functions, each of one or more operators. `graphs.trace` writes both into
the graph's meta:

- "in_place": the forward nodes whose operator overwrites its first argument;
- "backward_functions": for each function of autograd that runs several nodes, their names.

Graph files without them, or with names that the graph has not, are taken for having none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphs.graph import Graph


@dataclass(frozen=True)
class EagerStep:
    """in_place: forward nodes that overwrite their first argument. last_write: tensor -> position,
    among the forward nodes, of the last one that overwrites its memory in eager mode.
    function_of: later node -> all nodes of the autograd function that it belongs to, in order."""

    in_place: frozenset[str]
    last_write: Mapping[str, int]
    function_of: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: Graph) -> EagerStep:
        """Cost: linear in the size of the graph."""
        forward = {node.name: position for position, node in enumerate(graph.forward_nodes)}
        in_place = frozenset(n for n in graph.meta.in_place if n in forward)
        later = {node.name for node in graph.later_nodes}
        function_of: dict[str, tuple[str, ...]] = {}
        for each in graph.meta.backward_functions:
            nodes = tuple(name for name in each if name in later)
            function_of.update(dict.fromkeys(nodes, nodes))
        return cls(
            in_place=in_place,
            last_write=_last_writes(graph, in_place),
            function_of=function_of,
        )


def _last_writes(graph: Graph, in_place: frozenset[str]) -> dict[str, int]:
    """An operator in place makes no memory of its own: what it makes lives where it wrote."""
    lives_on: dict[str, str] = {}  # tensor -> the first tensor that lived in its memory
    written: dict[str, int] = {}
    for position, node in enumerate(graph.forward_nodes):
        if node.name in in_place and node.inputs and node.outputs:
            read = graph.root(node.inputs[0])
            home = lives_on.get(read, read)
            lives_on[node.outputs[0]] = home
            written[home] = position
    return {
        tensor.name: written[home]
        for tensor in graph.tensors
        if (home := lives_on.get(graph.root(tensor.name), graph.root(tensor.name))) in written
    }
