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
   until it is done, however many operators it runs (`solver.eager`).
6. While a region runs, Python's local variables hold results: each stays until the call of the
   innermost module is over in which it was made and read. So the peak errs on the large side.

A region must not overwrite what it reads, nor may anything after it: it would run again from other
values.

What regions cannot say: recompute a tensor in time for one reader alone, drop it between two
readers, or recompute operators that are called outside of any region.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphs.graph import Graph, Node, is_under
from solver.eager import EagerStep
from solver.schedule import Schedule, free_after_last_use


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


@dataclass(frozen=True)
class Replayed:
    """schedule: for the judge. n_reruns: path -> how often its region runs again in a step."""

    schedule: Schedule
    n_reruns: Mapping[str, int]


def replay_regions(
    graph: Graph, regions: Sequence[Region], *, locals_held: bool = True
) -> Replayed:
    """The step when these disjoint regions are checkpointed. Raises RegionError.

    locals_held: rule 6. False for regions whose code is a loop over their modules with one
    variable (nn.Sequential): then only the arguments of a region are held while it runs.

    Cost: linear in the number of operators that run, times the depth of regions.
    """
    return _Replay(graph, _Layout(graph, regions), locals_held=locals_held).run()


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
    layout = _Layout(graph, (region,))
    names = tuple(name for name in layout.made_by(region.nodes) if not layout.stays(name))
    if names:
        for node in region.nodes[: layout.n_again(region)]:
            runs_again(graph, node, region)
        _refuse_overwritten(graph, layout, region)
    return names


def _refuse_overwritten(graph: Graph, layout: _Layout, region: Region) -> None:
    last_write = EagerStep.of(graph).last_write
    first = next(p for p, n in enumerate(graph.forward_nodes) if n.name == region.nodes[0])
    for name in layout.arguments(region):
        if last_write.get(name, -1) >= first:
            writer = graph.forward_nodes[last_write[name]]
            raise RegionError(
                f"{name!r}, which module {region.path!r} reads, is overwritten in place by "
                f"{writer.name!r} in module {writer.module!r}"
            )


def runs_again(graph: Graph, name: str, region: Region) -> bool:
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


class _Layout:
    """Which regions a node is in, and in which of them each tensor is put by."""

    def __init__(self, graph: Graph, regions: Sequence[Region]) -> None:
        self.graph = graph
        self.chain_of: dict[str, Chain] = {}
        self._depth: dict[str, int] = {}
        self._homes: dict[str, frozenset[int]] = {}
        self._outputs = frozenset(graph.outputs)
        for region in regions:
            self._enter(region, ())
        self._regions = tuple(regions)
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
        regions = self._regions
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
                depth = _n_common(made_in, read_in)
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

    def n_again(self, region: Region) -> int:
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


def _n_common(one: Chain, other: Chain) -> int:
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        depth += 1
    return depth


class _Replay:
    """Runs the step on paper, collecting the order of nodes and who holds what until when."""

    def __init__(self, graph: Graph, layout: _Layout, *, locals_held: bool) -> None:
        self._graph = graph
        self._layout = layout
        self._locals_held = locals_held
        self._order: list[str] = []
        self._held: defaultdict[int, list[str]] = defaultdict(list)
        self._available: set[str] = {tensor.name for tensor in graph.resident}
        self._n_reruns: dict[str, int] = {}
        self._done: set[str] = set()
        self._left_readers = self._count_later_readers()
        self._last_backward: dict[str, int] = {}
        self._function_of = EagerStep.of(graph).function_of

    def run(self) -> Replayed:
        graph, layout = self._graph, self._layout
        for region in (r for top in layout._regions for r in top.flat()):
            self._n_reruns[region.path] = 0
        self._order += [node.name for node in graph.forward_nodes]
        self._hold_locals(0)
        for node in graph.forward_nodes:
            self._available.update(name for name in node.outputs if layout.stays(name))
        for node in graph.later_nodes:
            function = self._function_of.get(node.name, (node.name,))
            if node.name == function[0]:
                self._unpack(function)
            for region in layout.chain(node.name):
                self._last_backward[region.path] = len(self._order)
            if node.name == function[-1]:
                self._held[len(self._order)] += self._read_by(function)
            self._order.append(node.name)
            self._available.update(node.outputs)
            for name in dict.fromkeys(node.inputs):
                if name in self._left_readers:
                    self._left_readers[name] -= 1
        for region in (r for top in layout._regions for r in top.flat()):
            if region.path in self._last_backward:
                self._held[self._last_backward[region.path]] += layout.arguments(region)
        schedule = free_after_last_use(graph, self._order, held=self._held)
        return Replayed(schedule=schedule, n_reruns=self._n_reruns)

    def _read_by(self, function: Iterable[str]) -> list[str]:
        """The tensors that were made for these nodes."""
        read = (name for each in function for name in self._graph.node_by_name[each].inputs)
        return [name for name in dict.fromkeys(read) if name in self._graph.producer]

    def _unpack(self, function: Sequence[str]) -> None:
        """Have everything on hand that these later nodes read of the forward pass."""
        chain = self._layout.chain(function[0])
        if chain and any(self._was_put_by(n) for e in function for n in self._inputs(e)):
            self._rerun_once(chain)
        for name in self._read_by(function):
            if name not in self._available and self._graph.producer[name].phase == "forward":
                self._restore(name, chain)

    def _inputs(self, node: str) -> tuple[str, ...]:
        return self._graph.node_by_name[node].inputs

    def _was_put_by(self, name: str) -> bool:
        maker = self._graph.producer.get(name)
        if maker is None:
            return self._graph.tensor_by_name[name].kind in ("parameter", "buffer", "input")
        return maker.phase == "forward"

    def _rerun_once(self, chain: Chain) -> None:
        if chain[-1].path not in self._done:
            self._rerun(chain)

    def _count_later_readers(self) -> dict[str, int]:
        return {
            name: sum(reader.phase != "forward" for reader in self._graph.consumers[name])
            for node in self._graph.forward_nodes
            for name in node.outputs
        }

    def _restore(self, name: str, reader: Chain) -> None:
        """Run the region again that put the tensor by for a reader inside these regions."""
        made_in = self._layout.chain(self._graph.producer[name].name)
        depth = _n_common(made_in, reader)
        if not depth:
            raise RegionError(f"tensor {name!r} is missing outside of all regions")
        self._rerun(made_in[:depth])
        if name not in self._available:
            raise RegionError(f"region {made_in[depth - 1].path!r} does not make {name!r} again")

    def _rerun(self, chain: Chain) -> None:
        region = chain[-1]
        self._done.add(region.path)
        if len(chain) > 1:  # its arguments were put by there
            self._rerun_once(chain[:-1])
        for name in self._layout.arguments(region):
            if name not in self._available:
                self._restore(name, chain[:-1])
        wanted = self._layout.wanted(region)
        start = len(self._order)
        for name in region.nodes[: self._layout.n_again(region)]:
            if self._runs_again(name, region):
                self._order.append(name)
        emitted = self._order[start:]
        self._hold_locals(start)
        for inside in region.flat():
            self._n_reruns[inside.path] += not set(emitted).isdisjoint(inside.nodes)
        self._available.update(wanted)

    def _runs_again(self, name: str, region: Region) -> bool:
        """`runs_again`, and False for what is still there."""
        outputs = self._graph.node_by_name[name].outputs
        if outputs and all(o in self._available and self._left_readers[o] for o in outputs):
            return False  # the framework would make a second copy, which is dropped at once
        return runs_again(self._graph, name, region)

    def _hold_locals(self, start: int) -> None:
        """Of what was run from `start` on inside regions: held until the calls are over."""
        if not self._locals_held:
            self._hold_arguments(start)
            return
        last_of: dict[str, int] = {}
        run = range(start, len(self._order))
        for position in run:
            for path in _ancestors(self._graph.node_by_name[self._order[position]].module):
                last_of[path] = position
        for position in run:
            node = self._graph.node_by_name[self._order[position]]
            chain = self._layout.chain(node.name)
            if chain:
                until = self._scope(node, chain[0])
                for name in node.outputs:
                    self._held[last_of[until]].append(name)

    def _hold_arguments(self, start: int) -> None:
        """Of each region of which something was run from `start` on: until the last of it."""
        last_of: dict[str, tuple[Region, int]] = {}
        for position in range(start, len(self._order)):
            for region in self._layout.chain(self._order[position]):
                last_of[region.path] = region, position
        for region, position in last_of.values():
            self._held[position] += self._layout.arguments(region)

    def _scope(self, node: Node, region: Region) -> str:
        """The innermost module, within the region, that both makes and reads what the node makes"""
        scope = node.module
        for name in node.outputs:
            for reader in self._graph.consumers[name]:
                inside = reader.phase == "forward" and is_under(reader.module, region.path)
                while inside and not is_under(reader.module, scope):
                    scope = scope.rpartition(".")[0]
        return scope


def _ancestors(path: str) -> Iterator[str]:
    """The path itself and those of the modules around it, the root's empty one last."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
