"""What checkpointing whole parts of a model does to a step, as a schedule for the judge.

A region is a part of the forward pass that a framework runs again as a whole, as
`torch.utils.checkpoint` (use_reentrant=False) does with a module. Its rules are coarser than those
of a schedule, and they are followed here one by one:

1. What a region's operators put by for the backward pass is dropped; what they read from outside of
   the region, its arguments, stays until the region's backward is over.
2. When the backward pass first asks for anything that was put by in a region, be it a parameter or
   a saved result, all of the region runs again, from its arguments, until the last thing was put by
   a second time. Then it is all there at once, each tensor until its last use.
3. `saved` names operators whose results stay from the forward pass on (selective checkpointing):
   they do not run again, everything else of the region does, needed or not.
4. A region inside a region drops its own part again when the outer one has run again, and runs once
   more when its backward comes.
5. A function of the backward pass asks for everything that it has put by at once, and holds it
   until it is done, however many operators it runs (`solver.module_checkpointing.eager`).
6. While a region runs, Python's local variables hold results: each stays until the call of the
   innermost module is over in which it was made and read. So the peak errs on the large side.

A region must not overwrite what it reads, nor may anything after it: it would run again from other
values.

What regions cannot say: recompute a tensor in time for one reader alone, drop it between two
readers, or recompute operators that are called outside of any region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphs.graph import Graph, is_under
from solver.module_checkpointing.eager import EagerStep


class RegionError(ValueError):
    """These nodes cannot be run again as a whole; says which and why."""


@dataclass(frozen=True)
class Region:
    """path: of the module, "blocks.3". nodes: its forward nodes, contiguous in graph order.
    saved: those of them whose results are kept. inner: regions inside, in order."""

    path: str
    nodes: tuple[str, ...]
    saved: frozenset[str] = frozenset()
    inner: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        if self.saved and self.inner:
            raise RegionError(f"region {self.path!r} cannot both save and have regions inside")

    def flat(self) -> Iterator[Region]:
        """This region and all inside."""
        yield self
        for region in self.inner:
            yield from region.flat()


def nodes_of(graph: Graph, path: str) -> tuple[str, ...]:
    """The forward nodes that the module at this path calls, itself or in its parts, in order.

    Raises RegionError where they cannot be one call of it.
    """
    positions = [p for p, node in enumerate(graph.forward_nodes) if is_under(node.module, path)]
    if positions and positions[-1] - positions[0] + 1 != len(positions):
        raise RegionError(f"module {path!r} is called several times in a step")
    names = tuple(graph.forward_nodes[p].name for p in positions)
    readers: dict[str, int] = defaultdict(int)
    for name in names:
        for read in dict.fromkeys(graph.node_by_name[name].inputs):
            if graph.tensor_by_name[read].kind == "parameter":
                readers[read] += 1
    if readers and min(readers.values()) > 1:
        raise RegionError(f"module {path!r} is called several times in a step")
    return names


def dropped_by(graph: Graph, region: Region) -> tuple[str, ...]:
    """The tensors that the region drops after the forward pass and its backward misses.

    Raises RegionError where it cannot run again.
    """
    layout = RegionLayout(graph, (region,))
    names = tuple(name for name in layout.made_by(region.nodes) if not layout.stays(name))
    if names:
        for node in region.nodes[: layout.n_recomputed(region)]:
            is_recomputed(graph, node, region)
        _refuse_overwritten(graph, layout, region)
    return names


def _refuse_overwritten(graph: Graph, layout: RegionLayout, region: Region) -> None:
    last_write = EagerStep.of(graph).last_write
    first = next(p for p, n in enumerate(graph.forward_nodes) if n.name == region.nodes[0])
    for name in layout.arguments(region):
        if last_write.get(name, -1) >= first:
            writer = graph.forward_nodes[last_write[name]]
            raise RegionError(
                f"{name!r}, which module {region.path!r} reads, is overwritten in place by "
                f"{writer.name!r} in module {writer.module!r}"
            )


def is_recomputed(graph: Graph, name: str, region: Region) -> bool:
    """False for what is saved and for updates of buffers. Raises RegionError for what may not."""
    node = graph.node_by_name[name]
    if name in region.saved:
        return False
    if node.recomputable:
        return True
    for out in node.outputs:
        for reader in graph.consumers[out]:
            if reader.phase != "forward" or reader.name in region.nodes:
                raise RegionError(
                    f"{name!r} ({node.op}) in module {region.path!r} may not run a second time"
                )
    return False


Chain: TypeAlias = tuple[Region, ...]
"""Regions around something, the outermost first."""


class RegionLayout:
    """Which regions a node is in, and in which of them each tensor is put by."""

    def __init__(self, graph: Graph, regions: Sequence[Region]) -> None:
        self.graph = graph
        self.chain_of: dict[str, Chain] = {}
        self._depth: dict[str, int] = {}
        self._homes: dict[str, frozenset[int]] = {}
        self._outputs = frozenset(graph.outputs)
        for region in regions:
            self._enter(region, ())
        self.regions = tuple(regions)
        by_path = {path: self._by_path(path) for path in {n.module for n in graph.later_nodes}}
        self._read_later: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for node in graph.later_nodes:
            self.chain_of[node.name] = by_path[node.module]
            if by_path[node.module]:
                self._read_later[node.module, by_path[node.module][-1].path] += node.inputs

    def _enter(self, region: Region, outside: Chain) -> None:
        chain = (*outside, region)
        self._depth[region.path] = len(chain)
        for name in region.nodes:
            if self.chain_of.get(name, ()) != outside:
                raise RegionError(f"node {name!r} is in two regions, one of them {region.path!r}")
            self.chain_of[name] = chain
        for inner in region.inner:
            self._enter(inner, chain)

    def _by_path(self, path: str) -> Chain:
        chain: Chain = ()
        regions = self.regions
        while True:
            inside = next((r for r in regions if is_under(path, r.path)), None)
            if inside is None:
                return chain
            chain = (*chain, inside)
            regions = inside.inner

    def chain(self, node: str) -> Chain:
        return self.chain_of.get(node, ())

    def made_by(self, nodes: Iterable[str]) -> list[str]:
        return [name for node in nodes for name in self.graph.node_by_name[node].outputs]

    def homes(self, name: str) -> frozenset[int]:
        """How many regions deep the frames are that put a tensor of the forward pass by.

        0: it is put by outside of all, so it stays. A tensor is put by where a backward node reads
        it, in the innermost region that it was also made in; and as argument of a region, outside.
        """
        if name not in self._homes:
            maker = self.graph.producer[name].name
            made_in = self.chain(maker)
            found = {0} if name in self._outputs else set()
            if any(maker in region.saved for region in made_in):
                found.add(0)
            for reader in self.graph.consumers[name]:
                read_in = self.chain(reader.name)
                depth = n_common(made_in, read_in)
                if reader.phase != "forward" or len(read_in) > depth:
                    found.add(depth)
            self._homes[name] = frozenset(found)
        return self._homes[name]

    def stays(self, name: str) -> bool:
        """Whether it is there after the forward pass, or nobody asks for it then."""
        return not self.homes(name) or 0 in self.homes(name)

    def wanted(self, region: Region) -> list[str]:
        """What of the region its backward misses, where nothing of it is saved, and what inner
        regions take as arguments."""
        depth = self._depth[region.path]
        return [name for name in self.made_by(region.nodes) if depth in self.homes(name)]

    def n_recomputed(self, region: Region) -> int:
        """How many of the region's nodes are over when it has put by everything once more.

        An operator puts by what it reads before it runs, and what it makes afterwards. Which one
        of the forward pass belongs to a backward node is not known: it is taken for the last one of
        the same module that reads or makes the tensor.
        """
        n_over = 0
        wanted = set(self.wanted(region))
        for position, name in enumerate(region.nodes):
            node = self.graph.node_by_name[name]
            if not wanted.isdisjoint(node.outputs):
                n_over = position + 1
            inside = self.chain(name)[-1]
            if inside is not region:  # an inner region's arguments
                if inside.nodes[0] == name:
                    n_over = max(n_over, position)
            elif not set(self._read_later[node.module, region.path]).isdisjoint(node.inputs):
                n_over = max(n_over, position)
        return n_over

    def arguments(self, region: Region) -> list[str]:
        """The tensors from outside that a region reads."""
        made = set(self.made_by(region.nodes))
        read = (name for node in region.nodes for name in self.graph.node_by_name[node].inputs)
        return [n for n in dict.fromkeys(read) if n not in made and n in self.graph.producer]


def n_common(one: Chain, other: Chain) -> int:
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        depth += 1
    return depth
