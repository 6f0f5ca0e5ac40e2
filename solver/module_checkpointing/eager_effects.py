"""What eager mode does to a traced step that its graph alone does not say.

A graph is functional and made of single operators. Eager mode runs some of them in place, and its
backward pass runs whole functions, each of one or more operators. `graphs.trace` writes both into
the graph's meta: `in_place` and `backward_functions`. Names there that the graph does not have are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphs.graph import Graph


@dataclass(frozen=True)
class EagerStep:
    """What eager mode does beside the graph.

    in_place: forward nodes that overwrite their first argument.
    last_write: tensor -> position, among the forward nodes, of the last one that overwrites its
        memory.
    function_of: later node -> all nodes of the autograd function that it belongs to, in order.
    """

    in_place: frozenset[str]
    last_write: Mapping[str, int]
    function_of: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: Graph) -> EagerStep:
        """Cost: linear in the size of the graph."""
        in_place = frozenset(graph.meta.eager_overwrites).intersection(
            n.name for n in graph.forward_nodes
        )
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
    import networkx  # takes 0.1 s, and only plans by module come here

    # an operator in place allocates nothing: its output is in the memory of its first argument
    memory = networkx.Graph()
    for position, node in enumerate(graph.forward_nodes):
        if node.name in in_place and node.inputs and node.outputs:
            memory.add_edge(graph.root(node.inputs[0]), node.outputs[0], position=position)
    written: dict[str, int] = {}
    for storages in networkx.connected_components(memory):
        last = max(position for _, _, position in memory.edges(storages, data="position"))
        written.update(dict.fromkeys(storages, last))
    roots = ((tensor.name, graph.root(tensor.name)) for tensor in graph.tensors)
    return {name: written[root] for name, root in roots if root in written}
