"""Which nodes run when a region is recomputed, and which results stay, given what it saves."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from graphs.graph import Graph
from solver.module_checkpointing.eager_effects import EagerStep
from solver.module_checkpointing.regions import CheckpointRegion, RegionLayout, is_recomputed


@dataclass(frozen=True)
class Recomputation:
    """The recomputation of one region, for any choice of saved nodes.

    nodes: the nodes that can be recomputed or saved, up to the last one needed, in order.
    needed_by_backward: tensors of the region that are dropped and that its backward needs, whether
        it reads them or only holds them.
    keeps_unread: see `CheckpointRegion`.
    """

    nodes: tuple[str, ...]
    needed_by_backward: frozenset[str]
    keeps_unread: bool
    _graph: Graph = field(repr=False)
    _in_place: Set[str] = field(repr=False)

    @classmethod
    def of(cls, layout: RegionLayout, region: CheckpointRegion) -> Recomputation:
        """Raises RegionError if a node that may not run a second time is needed."""
        graph = layout.graph
        first = region.nodes[: layout.n_nodes_recomputed(region)]
        return cls(
            nodes=tuple(
                name for name in first if name in region.saved or is_recomputed(graph, name, region)
            ),
            needed_by_backward=frozenset(layout.saved_in(region)),
            keeps_unread=region.keeps_unread,
            _graph=graph,
            _in_place=EagerStep.of(graph).in_place,
        )

    def nodes_to_run(self, saved: Set[str]) -> tuple[str, ...]:
        """The nodes that run when the region is recomputed, in order.

        If nothing is saved, all nodes run. Otherwise only those that the backward pass needs, and
        in-place nodes that overwrite a needed result.

        saved: the nodes whose results are kept.
        """
        if not saved:
            return self.nodes
        graph = self._graph
        unvisited = set(self.nodes) - saved
        runs: set[str] = set()
        # Go back from what the backward pass needs, stopping at saved nodes.
        unchecked = [graph.producer[name].name for name in self.needed_by_backward]
        while unchecked:
            name = unchecked.pop()
            if name not in unvisited:
                continue
            unvisited.remove(name)
            runs.add(name)
            node = graph.node_by_name[name]
            unchecked += [
                graph.producer[n].name for n in graph.needs[node.name] if n in graph.producer
            ]
            unchecked += [
                reader.name
                for out in node.outputs
                for reader in graph.consumers[out]
                if reader.name in self._in_place and reader.inputs[0] == out
            ]
        return tuple(name for name in self.nodes if name in runs)

    def kept_outputs(self, saved: Set[str]) -> dict[str, tuple[str, ...]]:
        """Saved node -> its outputs that stay: all, or all but the first if nobody reads that one.

        A node none of whose outputs is read is left out, unless the region `keeps_unread`.
        """
        outputs_of = {
            name: tuple(
                out
                for out in self._graph.node_by_name[name].outputs
                if out not in self._graph.meta.dead_results
            )
            for name in sorted(saved)
        }
        if self.keeps_unread:
            return outputs_of
        runs = set(self.nodes_to_run(saved))
        kept: dict[str, tuple[str, ...]] = {}
        for name, outputs in outputs_of.items():
            read = [
                out
                for out in outputs
                if out in self.needed_by_backward
                or any(reader.name in runs for reader in self._graph.consumers[out])
            ]
            if read:
                kept[name] = outputs if outputs[0] in read else outputs[1:]
        return kept
