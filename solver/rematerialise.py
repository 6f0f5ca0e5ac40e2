"""From a decision to an order: run the forward pass, then recompute what is missing just in time.

Methods decide in different words: which tensors to keep (`sqrt`, `every_block`, the cut bound), or
which block to run when (`revolve`, `dp`). Both become an order of node names here, and
`free_after_last_use` turns an order into a schedule. No method frees anything by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from graphs.graph import Graph
from solver.schedule import Schedule, free_after_last_use


def baseline(graph: Graph) -> Schedule:
    """Each node once, in the framework's order, each tensor freed after its last use."""
    return free_after_last_use(graph, (node.name for node in graph.nodes))


def keep(graph: Graph, kept: Collection[str]) -> Schedule:
    """The schedule that keeps these storages from the forward pass and recomputes the others.

    Every other tensor of the forward pass is dropped after the forward pass's last use; when a
    later op needs it, it is made again right before that op, with whatever it needs in turn, and
    then held to its last use.
    """
    return free_after_last_use(graph, keep_order(graph, kept))


def keep_order(graph: Graph, kept: Collection[str]) -> list[str]:
    """The order of nodes behind `keep`. What may not be made again is kept in any case."""
    available = {tensor.name for tensor in graph.resident}
    order: list[str] = []
    for node in graph.forward_nodes:
        order.append(node.name)
        for name in node.outputs:
            if graph.root(name) in kept or not node.recomputable:
                available.add(name)
    for node in graph.later_nodes:
        order.extend(missing_computes(graph, node.inputs, available))
        order.append(node.name)
        available.update(node.outputs)
    return order


def missing_computes(graph: Graph, needed: Iterable[str], available: set[str]) -> list[str]:
    """Forward nodes to run, in graph order of need, so that `needed` is there; adds to `available`.

    Depth first, without recursion: a chain of a thousand blocks may have to be made again.
    """
    order: list[str] = []
    stack = [name for name in needed if name not in available]
    stack.reverse()
    while stack:
        name = stack[-1]
        if name in available:
            stack.pop()
            continue
        node = graph.producer[name]
        wanted = [other for other in node.inputs if other not in available]
        root = graph.root(name)
        if root != name and root in graph.producer and root not in available:
            wanted.append(root)
        if wanted:
            stack.extend(reversed(wanted))
            continue
        order.append(node.name)
        available.update(node.outputs)
        stack.pop()
    return order


def without_dead_computes(graph: Graph, order: Sequence[str]) -> list[str]:
    """The order without recomputations whose results nobody reads before they are made again.

    First runs stay, read or not: the step is only whole with them.
    """
    first: dict[str, int] = {}
    for position, name in enumerate(order):
        first.setdefault(name, position)
    wanted = set(graph.outputs)
    alive: list[str] = []
    for position in range(len(order) - 1, -1, -1):
        node = graph.node_by_name[order[position]]
        if first[node.name] < position and not wanted.intersection(node.outputs):
            continue
        wanted.difference_update(node.outputs)
        wanted.update(node.inputs)
        alive.append(node.name)
    alive.reverse()
    return alive
