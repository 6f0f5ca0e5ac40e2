"""From a method's decision to an order of nodes: run the forward pass, then recompute just in time.

Some methods decide which tensors to keep (`sqrt`, `every_block`, the cut bound), others which block
to run when (`revolve`, `dp`). Here both kinds of decision become an order of node names, and
`free_after_last_use` turns that order into a schedule. No method places `Free` ops by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from graphs.graph import Graph, Node
from solver.schedule.ops import Schedule, free_after_last_use


def baseline(graph: Graph) -> Schedule:
    """The schedule that runs each node once, in the framework's order, and frees each tensor after
    its last use."""
    return free_after_last_use(graph, (node.name for node in graph.nodes))


def keep(graph: Graph, kept: Collection[str]) -> Schedule:
    """The schedule that keeps these storages from the forward pass and recomputes the others.

    Every other tensor of the forward pass is freed after its last use there. When a later op needs
    it, it is recomputed right before that op, together with the missing inputs of its node, and
    then held until its last use.

    kept: names of tensors; a view stands for its storage. Raises ValueError for an unknown name.
    """
    for name in kept:
        if name not in graph.tensor_by_name:
            raise ValueError(f"kept names {name!r}, which is not a tensor of the graph")
    return free_after_last_use(graph, keep_order(graph, {graph.root(name) for name in kept}))


def keep_order(
    graph: Graph,
    kept: Collection[str],
    *,
    together: Callable[[Node], Iterable[str]] = lambda _node: (),
) -> list[str]:
    """The order of nodes behind `keep`. Outputs of nodes that cannot be recomputed are always kept.

    kept: root tensors of the storages to keep.
    together: node -> further tensors to recompute whenever this node has to be recomputed.
    """
    order = [node.name for node in graph.forward_nodes]
    available = {tensor.name for tensor in graph.resident}
    for node in graph.forward_nodes:
        is_kept = not is_recomputable(graph, node)
        available.update(name for name in node.outputs if is_kept or graph.root(name) in kept)
    for node in graph.later_nodes:
        while missing := [name for name in graph.needs[node.name] if name not in available]:
            first = graph.producer[missing[0]]
            order += missing_computes(graph, (*together(first), *missing), available)
        order.append(node.name)
        available.update(node.outputs)
    order += missing_computes(graph, lost_views(graph, order), available)
    return order


def lost_views(graph: Graph, order: Sequence[str]) -> list[str]:
    """Outputs of the graph that are views of a storage that was recomputed after the view was made.

    They show the old storage, so they have to be made again.
    """
    last = {name: position for position, name in enumerate(order)}
    lost = []
    for name in graph.outputs:
        maker = graph.producer.get(name)
        owner = graph.producer.get(graph.root(name))
        if maker and owner and last[maker.name] < last[owner.name]:
            lost.append(name)
    return lost


def is_recomputable(graph: Graph, node: Node) -> bool:
    """Whether a schedule may recompute the node.

    It may not if another node that makes a view of its output may not be recomputed (by the same
    rule, applied recursively): that view would stay on the old storage.
    """
    makers = {node.name: node}
    unchecked = [node]
    while unchecked:
        maker = unchecked.pop()
        if not maker.recomputable or maker.phase != "forward":
            return False
        views = (view for name in maker.outputs for view in graph.views.get(name, ()))
        found = {graph.producer[view].name: graph.producer[view] for view in views}
        unchecked += [found[name] for name in found.keys() - makers.keys()]
        makers |= found
    return True


def missing_computes(graph: Graph, needed: Iterable[str], available: set[str]) -> list[str]:
    """The forward nodes to run, in a valid order, so that all `needed` tensors are available.

    available: the tensors on the device; updated. What the nodes compute is added. Views of what
        they recompute are removed, since they show the old storage.
    """
    # Depth first without recursion, since a chain of a thousand blocks may be missing. Written by
    # hand for speed: for all later nodes of a graph with 27,521 nodes this takes 0.13 s, NetworkX's
    # dfs_postorder_nodes on a view of the missing nodes 31 s.
    needed = tuple(needed)
    order: list[str] = []
    stack = [name for name in reversed(needed) if name not in available]
    while stack:
        name = stack[-1]
        if name in available:
            stack.pop()
        else:
            node = graph.producer[name]
            missing_inputs = [other for other in graph.needs[node.name] if other not in available]
            if missing_inputs:
                stack.extend(reversed(missing_inputs))
                continue
            order.append(node.name)
            for output in node.outputs:
                available.difference_update(graph.views.get(output, ()))
            available.update(node.outputs)
            stack.pop()
        if not stack:  # recomputing a storage may have removed a needed view of it
            stack = [other for other in reversed(needed) if other not in available]
    return order


def without_dead_computes(graph: Graph, order: Sequence[str]) -> list[str]:
    """The order without recomputations whose results nobody reads before the node runs again.

    The first run of each node stays in any case: the step is not complete without it.
    """
    first: dict[str, int] = {}
    for position, name in enumerate(order):
        first.setdefault(name, position)
    needed_later = set(graph.outputs)
    alive: list[str] = []
    for position in range(len(order) - 1, -1, -1):
        node = graph.node_by_name[order[position]]
        if first[node.name] < position and not needed_later.intersection(node.outputs):
            continue
        needed_later.difference_update(node.outputs)
        needed_later.update(graph.needs[node.name])
        alive.append(node.name)
    alive.reverse()
    return alive
