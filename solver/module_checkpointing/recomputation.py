"""What runs when a region is recomputed, and what stays for that, by what the region saves."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from graphs.graph import Graph
from solver.module_checkpointing.eager_effects import EagerStep
from solver.module_checkpointing.regions import CheckpointRegion, RegionLayout, is_recomputed


@dataclass(frozen=True)
class Recomputation:
    """Of one region, whatever it saves.

    nodes: those that can be recomputed, up to the last that is needed, in order.
    packed: tensors of the region that its backward lacks, read or only saved.
    keeps_unread: as of `CheckpointRegion`.
    """

    nodes: tuple[str, ...]
    packed: frozenset[str]
    keeps_unread: bool
    _graph: Graph = field(repr=False)
    _in_place: Set[str] = field(repr=False)

    @classmethod
    def of(cls, layout: RegionLayout, region: CheckpointRegion) -> Recomputation:
        """Raises RegionError where a node is needed that may not run a second time."""
        graph = layout.graph
        first = region.nodes[: layout.n_nodes_recomputed(region)]
        return cls(
            nodes=tuple(
                name for name in first if name in region.saved or is_recomputed(graph, name, region)
            ),
            packed=frozenset(layout.wanted(region)),
            keeps_unread=region.keeps_unread,
            _graph=graph,
            _in_place=EagerStep.of(graph).in_place,
        )

    def runs(self, saved: Set[str]) -> tuple[str, ...]:
        """The nodes that run, in order.

        Of a region that saves, those that the backward pass needs; what overwrites a result that is
        needed runs too. Else all.
        """
        if not saved:
            return self.nodes
        graph = self._graph
        left = set(self.nodes) - saved
        runs: set[str] = set()
        unchecked = [graph.producer[name].name for name in self.packed]
        while unchecked:
            name = unchecked.pop()
            if name not in left:
                continue
            left.remove(name)
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

    def kept(self, saved: Set[str]) -> dict[str, tuple[str, ...]]:
        """By saved node, what of its results stays: all, or all but the first, where that is read
        by nobody. A node of which nothing is read is left out, unless the region keeps that.
        """
        if self.keeps_unread:
            return {name: self._graph.node_by_name[name].outputs for name in sorted(saved)}
        runs = set(self.runs(saved))
        kept: dict[str, tuple[str, ...]] = {}
        for name in sorted(saved):
            outputs = self._graph.node_by_name[name].outputs
            read = [
                out
                for out in outputs
                if out in self.packed
                or any(reader.name in runs for reader in self._graph.consumers[out])
            ]
            if read:
                kept[name] = outputs if outputs[0] in read else outputs[1:]
        return kept
