"""Checkpointing as frameworks do it: whole stretches of the forward pass run again at once.

`rematerialise.keep` makes each missing tensor again just before it is read. A checkpointed function
of `torch.utils.checkpoint`, and of the systems that are built on it, runs again as a whole when the
backward pass first needs something of it, and what it makes stays until it has been read. To say
what such a setting costs, that is what must be judged.

An approximation in two places: a tensor that one stretch hands on to the next is not made a second
time (PyTorch's reentrant checkpoint makes it, and holds it while the stretch's backward pass runs:
these bytes are missing here), and what nobody reads of a node that runs again is dropped at once.
`solver.module_checkpointing.regions` follows PyTorch's non-reentrant way in eager mode closely, for
modules of a real model; here are the other systems' ways, as forecasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from solver.schedule import (
    Schedule,
    after_forward,
    free_after_last_use,
    lost_views,
    missing_computes,
    needs,
)


@dataclass(frozen=True)
class Stretch:
    """Forward nodes that run again together, in graph order.

    saved: those of them whose outputs are kept all the same. drops_output: what the stretch hands
    on is dropped as well once the forward pass has read it. stops_early: it runs again only as far
    as the last node of which something is needed.
    """

    nodes: tuple[str, ...]
    saved: frozenset[str] = frozenset()
    drops_output: bool = False
    stops_early: bool = False


def schedule_from_stretches(graph: Graph, stretches: Sequence[Stretch]) -> Schedule:
    """The schedule of one step that checkpoints these stretches (disjoint) and keeps the rest."""
    stretch_of = {node: stretch for stretch in stretches for node in stretch.nodes}
    kept = _kept(graph, stretches, stretch_of)
    wanted_later = _wanted_later(graph, kept)
    order = [node.name for node in graph.forward_nodes]
    available = after_forward(graph, kept)
    for node in graph.later_nodes:
        missing = [name for name in needs(graph, node) if name not in available]
        while missing:
            stretch = stretch_of[graph.producer[missing[0]].name]
            made = _made(graph, stretch, wanted_later)
            order.extend(missing_computes(graph, (*made, *missing), available))
            missing = [name for name in needs(graph, node) if name not in available]
        order.append(node.name)
        available.update(node.outputs)
    order.extend(missing_computes(graph, lost_views(graph, order), available))
    return free_after_last_use(graph, order)


def _kept(
    graph: Graph, stretches: Iterable[Stretch], stretch_of: dict[str, Stretch]
) -> frozenset[str]:
    """Storages that stay: of no stretch, saved, or handed on to a node outside of the stretch."""
    kept = {
        graph.root(name)
        for node in graph.forward_nodes
        if node.name not in stretch_of or node.name in stretch_of[node.name].saved
        for name in node.outputs
    }
    for node in graph.forward_nodes:
        for name in needs(graph, node):
            maker = graph.producer.get(graph.root(name))
            stretch = None if maker is None else stretch_of.get(maker.name)
            if stretch is None or stretch.drops_output or stretch is stretch_of.get(node.name):
                continue
            kept.add(graph.root(name))
    return frozenset(kept | {graph.root(name) for name in graph.outputs})


def _wanted_later(graph: Graph, kept: frozenset[str]) -> frozenset[str]:
    """Forward nodes that make something that is dropped and read after the forward pass."""
    return frozenset(
        maker.name
        for node in graph.later_nodes
        for name in needs(graph, node)
        if graph.root(name) not in kept and (maker := graph.producer.get(name)) is not None
    )


def _made(graph: Graph, stretch: Stretch, wanted_later: frozenset[str]) -> list[str]:
    """The tensors that the stretch makes when it runs again."""
    n_run = len(stretch.nodes)
    if stretch.stops_early:
        n_run = max(
            (i + 1 for i, n in enumerate(stretch.nodes) if n in wanted_later), default=n_run
        )
    return [name for node in stretch.nodes[:n_run] for name in graph.node_by_name[node].outputs]
