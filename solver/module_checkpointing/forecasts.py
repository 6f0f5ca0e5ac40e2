"""What a step takes when another system checkpoints these regions: a forecast.

Why this is not `plan_regions`: that one follows PyTorch's non-reentrant checkpoints of whole
modules in eager mode, whose backward it finds by module path. Other systems checkpoint parts of
modules, several layers at once, or drop what a part hands on, and each holds other tensors
meanwhile. What they have in common is modelled here: the whole region is recomputed when the
backward pass first needs something of it, and what it makes stays until it has been read.

An approximation in two places: a tensor that one region hands on to the next is not recomputed
(PyTorch's reentrant checkpoint recomputes it, and holds it while the region's backward pass runs:
these bytes are missing here), and recomputed tensors that nothing reads are freed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphs.graph import Graph, Node
from solver.module_checkpointing.regions import CheckpointRegion
from solver.schedule import Schedule, free_after_last_use, keep_order


def forecast(graph: Graph, regions: Sequence[CheckpointRegion]) -> Schedule:
    """The schedule of one step that checkpoints these regions (disjoint) and keeps the rest."""
    region_of = {node: region for region in regions for node in region.nodes}
    kept = _kept(graph, region_of)
    read_later = {
        graph.producer[name].name
        for node in graph.later_nodes
        for name in graph.needs[node.name]
        if graph.root(name) not in kept and name in graph.producer
    }

    def with_its_region(node: Node) -> Iterable[str]:
        region = region_of[node.name]
        n_run = len(region.nodes)
        if region.stops_early:
            wanted = (i + 1 for i, name in enumerate(region.nodes) if name in read_later)
            n_run = max(wanted, default=n_run)
        return (out for name in region.nodes[:n_run] for out in graph.node_by_name[name].outputs)

    return free_after_last_use(graph, keep_order(graph, kept, together=with_its_region))


def _kept(graph: Graph, region_of: dict[str, CheckpointRegion]) -> frozenset[str]:
    """Storages that stay: of no region, saved, or handed on to a node outside of the region."""
    kept = {graph.root(name) for name in graph.outputs}
    for node in graph.forward_nodes:
        region = region_of.get(node.name)
        if region is None or node.name in region.saved:
            kept.update(map(graph.root, node.outputs))
        for name in graph.needs[node.name]:
            maker = graph.producer.get(graph.root(name))
            made_in = None if maker is None else region_of.get(maker.name)
            if made_in is not None and made_in is not region and not made_in.drops_output:
                kept.add(graph.root(name))
    return frozenset(kept)
