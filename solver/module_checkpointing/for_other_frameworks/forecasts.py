"""Forecast the schedule of a step in which another training system checkpoints given regions.

`plan_regions` models PyTorch's non-reentrant checkpoints of whole modules in eager mode, whose
backward it finds by module path. Other systems checkpoint parts of modules or several layers at
once, or drop a part's outputs too, and each holds different tensors meanwhile. This module models
what they have in common: a whole region is recomputed when the backward pass first needs one of its
tensors, and a recomputed tensor stays until its last reader has run.

It is an approximation in two ways. A tensor that one region passes on to the next is not
recomputed; PyTorch's reentrant checkpoint recomputes it, and holds it while the region's backward
pass runs, so these bytes are missing here. And recomputed tensors that nothing reads are freed at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphs.graph import Graph, Node
from solver.module_checkpointing.regions import CheckpointRegion
from solver.schedule import Schedule, free_after_last_use, keep_order


def forecast(graph: Graph, regions: Sequence[CheckpointRegion]) -> Schedule:
    """The schedule of a step that checkpoints these disjoint regions and keeps everything else."""
    region_of = {node: region for region in regions for node in region.nodes}
    kept = _kept_storages(graph, region_of)
    read_later = {
        graph.producer[name].name
        for node in graph.later_nodes
        for name in graph.needs[node.name]
        if graph.root(name) not in kept and name in graph.producer
    }

    def with_its_region(node: Node) -> Iterable[str]:
        """All outputs that are recomputed together with this node."""
        region = region_of[node.name]
        n_recomputed = len(region.nodes)
        if region.stops_early:
            needed_counts = (i + 1 for i, name in enumerate(region.nodes) if name in read_later)
            n_recomputed = max(needed_counts, default=n_recomputed)
        return (
            out for name in region.nodes[:n_recomputed] for out in graph.node_by_name[name].outputs
        )

    return free_after_last_use(graph, keep_order(graph, kept, together=with_its_region))


def _kept_storages(graph: Graph, region_of: dict[str, CheckpointRegion]) -> frozenset[str]:
    """The storages that are kept: made outside all regions, saved by their region, or read outside
    of it (unless it drops its outputs).

    region_of: forward node -> its region.
    """
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
