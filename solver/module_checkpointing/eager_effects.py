"""In-place operators and autograd functions of eager mode, which the graph itself does not show.

A graph is functional and made of single operators. Eager mode runs some of them in place, and its
backward pass runs whole autograd functions of one or more operators each. `graphs.trace` records
both in the graph's meta: `eager_overwrites` and `backward_functions`. Names there that the graph
does not have are ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphs.graph import Graph, is_under


@dataclass(frozen=True)
class EagerStep:
    """How eager mode runs the nodes of a graph.

    in_place: forward nodes that overwrite their first argument.
    last_write: tensor -> position, among the forward nodes, of the last one that overwrites its
        memory.
    function_of: node of the backward pass -> all nodes of its autograd function, in order.
    """

    in_place: frozenset[str]
    last_write: Mapping[str, int]
    function_of: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: Graph) -> EagerStep:
        """Read the graph's meta. Cost: linear in the size of the graph."""
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
    """Tensor -> position of the last forward node that overwrites its memory."""
    import networkx  # here, since it takes 0.1 s and only plans by module need it

    # An in-place operator allocates nothing: its output is in the memory of its first argument. So
    # storages that are connected by in-place operators share one memory.
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


def held_by_variables(graph: Graph) -> Mapping[str, Sequence[str]]:
    """Forward node -> tensors that variables of `forward` hold until it has run, after their last
    reader of the forward pass (`GraphMeta.held_in_calls`; names there that the graph does not have
    are left out).

    If no rehearsal was possible, each result counts until the call of the innermost module that
    contains its maker and its readers has returned: an upper bound.
    """
    if graph.meta.held_in_calls is not None:
        return {
            until: [name for name in names if name in graph.tensor_by_name]
            for until, names in graph.meta.held_in_calls.items()
            if until in graph.node_by_name
        }
    last_of: dict[str, str] = {}  # path of a module -> its last node
    for node in graph.forward_nodes:
        path = node.module
        while path:
            last_of[path] = node.name
            path = path.rpartition(".")[0]
        last_of[""] = node.name
    held: defaultdict[str, list[str]] = defaultdict(list)
    for node in graph.forward_nodes:
        for name in node.outputs:
            scope = node.module
            for reader in graph.consumers[name]:
                while reader.phase == "forward" and not is_under(reader.module, scope):
                    scope = scope.rpartition(".")[0]
            held[last_of[scope]].append(name)
    return held
