"""Checkpoint regions: parts of the forward pass that are recomputed as a whole.

A schedule recomputes single operators. Frameworks recompute everything that one checkpointed call
runs, as `torch.utils.checkpoint` does with a module. Its rules (`use_reentrant=False`) are coarser,
and `plan_regions` follows them one by one:

1. What a region's operators save for backward is dropped. The tensors that they read from outside
   the region, its arguments, stay until the region's backward is done.
2. When the backward pass first unpacks anything that was saved in a region, be it a parameter or
   an activation, the whole region is recomputed from its arguments, until the last tensor has been
   saved a second time. Then all its tensors are live at once, each until its last use.
3. `saved` names operators whose results stay from the forward pass on (selective checkpointing).
   They are not recomputed, nor are operators that contribute to nothing else (`Recomputation`).
   The results stay until the recomputation has used them; if it ends before it gets to them, until
   the region's backward is done.
4. A region inside another one drops its own part again when the outer one has been recomputed, and
   is recomputed once more for its own backward.
5. An autograd function unpacks everything that it has saved at once, whether it reads it or not,
   and holds it until it is done, however many operators it runs (`EagerStep`).
6. While a region runs, Python's local variables hold results, as long as they did in a rehearsal
   (`GraphMeta.held_in_calls`). If no rehearsal was possible, each result stays until the call of
   the innermost module that contains its maker and its readers has returned, so that the peak is
   rather over- than underestimated. What variables hold outside regions is known
   (`GraphMeta.saved_unread`).

Neither a region nor anything after it may overwrite what the region reads: it would be recomputed
from other values.

Regions cannot express recomputing a tensor just in time for a single reader, dropping it between
two readers, or recomputing operators that are called outside any region.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphs.graph import Graph, Node, is_under
from solver.module_checkpointing.eager_effects import EagerStep


class RegionError(ValueError):
    """These nodes cannot be recomputed as a whole; the message says which and why."""


@dataclass(frozen=True)
class CheckpointRegion:
    """A part of the forward pass that is recomputed as a whole.

    nodes: its forward nodes, in graph order.
    modules: paths of its modules: one, or consecutive ones in an nn.Sequential. () for a part of a
        module, which only `forecast` can plan.
    saved: those of its nodes whose results are kept (selective checkpointing).
    inner: the regions inside, disjoint and in order.
    stops_early: recomputation ends as soon as everything needed has been recomputed.
    keeps_unread: results of `saved` that nothing reads stay too, as with a policy that saves kinds
        of operators. Otherwise such an operator counts as not saved.
    drops_output: its outputs are dropped too, once the forward pass has read them. Only `forecast`
        can plan this.

    Raises RegionError for a region that both saves and has regions inside.
    """

    nodes: tuple[str, ...]
    modules: tuple[str, ...] = ()
    saved: frozenset[str] = frozenset()
    inner: tuple[CheckpointRegion, ...] = ()
    stops_early: bool = True
    keeps_unread: bool = False
    drops_output: bool = False

    def __post_init__(self) -> None:
        if self.saved and self.inner:
            raise RegionError(f"region {self.path!r} cannot both save and have regions inside")

    @property
    def path(self) -> str:
        """A readable name, unique among the regions of a plan: "blocks.3", or "0 .. 4"."""
        return " .. ".join(dict.fromkeys((*self.modules[:1], *self.modules[-1:])))

    def flat(self) -> Iterator[CheckpointRegion]:
        """This region and all regions inside it, at any depth."""
        yield self
        for region in self.inner:
            yield from region.flat()

    @property
    def depth(self) -> int:
        """Levels of nesting: 1 for a region with none inside."""
        return 1 + max((region.depth for region in self.inner), default=0)


def nodes_of(graph: Graph, path: str) -> tuple[str, ...]:
    """The forward nodes of the module at this path and of its submodules, in order.

    Raises RegionError if they are not one uninterrupted call of the module.
    """
    positions = [p for p, node in enumerate(graph.forward_nodes) if is_under(node.module, path)]
    nodes = [graph.forward_nodes[p] for p in positions]
    if graph.meta.module_calls.get(path, 1) > 1 or (
        path not in graph.meta.module_calls and _reads_every_parameter_twice(graph, nodes)
    ):
        raise RegionError(f"module {path!r} is called several times in a step")
    if positions and positions[-1] - positions[0] + 1 != len(positions):
        between = next(
            node
            for node in graph.forward_nodes[positions[0] : positions[-1]]
            if not is_under(node.module, path)
        )
        raise RegionError(
            f"{between.name!r} ({between.op}), called outside of module {path!r}, runs between its "
            "operators"
        )
    return tuple(node.name for node in nodes)


def _reads_every_parameter_twice(graph: Graph, nodes: Sequence[Node]) -> bool:
    """Whether the nodes read each of their parameters at least twice, as two calls of one module
    do."""
    readers = Counter(
        name
        for node in nodes
        for name in set(node.inputs)
        if graph.tensor_by_name[name].kind == "parameter"
    )
    return bool(readers) and min(readers.values()) > 1


def dropped_by(graph: Graph, region: CheckpointRegion) -> tuple[str, ...]:
    """The tensors that the region drops after the forward pass and that its backward needs.

    Raises RegionError if the region cannot be recomputed.
    """
    layout = RegionLayout(graph, (region,))
    names = tuple(name for name in layout.outputs_of(region.nodes) if not layout.stays(name))
    if not names:
        return ()
    for node in region.nodes[: layout.n_nodes_recomputed(region)]:
        is_recomputed(graph, node, region)
    last_write = EagerStep.of(graph).last_write
    first = next(p for p, n in enumerate(graph.forward_nodes) if n.name == region.nodes[0])
    for name in layout.arguments(region):
        if last_write.get(name, -1) >= first:
            writer = graph.forward_nodes[last_write[name]]
            raise RegionError(
                f"{name!r}, which module {region.path!r} reads, is overwritten in place by "
                f"{writer.name!r} in module {writer.module!r}"
            )
    return names


def is_recomputed(graph: Graph, name: str, region: CheckpointRegion) -> bool:
    """Whether recomputing the region recomputes this one of its nodes.

    False for saved nodes and for updates of buffers. Raises RegionError if the node would have to
    run a second time and may not.
    """
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


Nesting: TypeAlias = tuple[CheckpointRegion, ...]
"""The regions around a node, the outermost first."""


class RegionLayout:
    """Which regions each node is in, and in which of them each tensor is saved for backward.

    regions: the outermost ones.
    all_regions: these, and those inside them at any depth.

    Raises RegionError if a node is in two regions and neither is inside the other.
    """

    def __init__(self, graph: Graph, regions: Sequence[CheckpointRegion]) -> None:
        self.graph = graph
        self.regions = tuple(regions)
        self.all_regions = tuple(each for region in regions for each in region.flat())
        self._around: dict[str, Nesting] = {}
        self._depth: dict[str, int] = {}
        self._saved_at_depths: dict[str, frozenset[int]] = {}
        self._outputs = frozenset(graph.outputs)
        # tensor -> nodes of the backward pass for which it is held without being read
        self._unread: defaultdict[str, list[str]] = defaultdict(list)
        for node in graph.later_nodes:
            for name in self.held_unread(node.name):
                self._unread[name].append(node.name)
        for region in regions:
            self._add_region(region, ())
        # a node of the backward pass belongs to the regions around its module
        by_path = {
            path: self._regions_around(path) for path in {n.module for n in graph.later_nodes}
        }
        self._read_later: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for node in graph.later_nodes:
            self._around[node.name] = around = by_path[node.module]
            if around:
                read = self._read_later[node.module, around[-1].path]
                read.update(node.inputs, self.held_unread(node.name))

    def _add_region(self, region: CheckpointRegion, outside: Nesting) -> None:
        """Note the region and those inside it. outside: the regions around it."""
        around = (*outside, region)
        self._depth[region.path] = len(around)
        for name in region.nodes:
            if self._around.get(name, ()) != outside:
                raise RegionError(f"node {name!r} is in two regions, one of them {region.path!r}")
            self._around[name] = around
        for inner in region.inner:
            self._add_region(inner, around)

    def _regions_around(self, path: str) -> Nesting:
        """The regions around the module at this path."""
        around: Nesting = ()
        regions = self.regions
        while True:
            inside = next((r for r in regions if any(is_under(path, m) for m in r.modules)), None)
            if inside is None:
                return around
            around = (*around, inside)
            regions = inside.inner

    def held_unread(self, node: str) -> list[str]:
        """Tensors made in the step that eager mode holds until this node has run, though no later
        node reads them."""
        held = self.graph.meta.saved_unread.get(node, ())
        return [name for name in held if name in self.graph.producer]

    def held_by_variables(self, node: str) -> list[str]:
        """Tensors that variables of `forward` hold until this forward node has run.

        Tensors made in a region and saved by autograd are left out. Without checkpoints autograd
        holds them at least as long, so nothing is known of their variables; rule 6 counts them.
        """
        return [
            name
            for name in self.held_unread(node)
            if not (self._unread[name] and self.around(self.graph.producer[name].name))
        ]

    def around(self, node: str) -> Nesting:
        """The regions that the node is in, the outermost first."""
        return self._around.get(node, ())

    def outputs_of(self, nodes: Iterable[str]) -> list[str]:
        """The outputs of these nodes."""
        return [name for node in nodes for name in self.graph.node_by_name[node].outputs]

    def saved_at_depths(self, name: str) -> frozenset[int]:
        """The depths of the regions in which a tensor of the forward pass is saved for backward.

        0 stands for outside all regions: the tensor stays. For a backward node that reads or holds
        it, a tensor is saved in the innermost region that contains both that node and the tensor's
        maker. An argument of a region is saved outside that region.
        """
        if name not in self._saved_at_depths:
            maker = self.graph.producer[name].name
            made_in = self.around(maker)
            found = set()
            if name in self._outputs or any(maker in region.saved for region in made_in):
                found.add(0)
            for reader in self.graph.consumers[name]:
                read_in = self.around(reader.name)
                depth = n_common_regions(made_in, read_in)
                if reader.phase != "forward" or len(read_in) > depth:
                    found.add(depth)
            found |= {n_common_regions(made_in, self.around(later)) for later in self._unread[name]}
            self._saved_at_depths[name] = frozenset(found)
        return self._saved_at_depths[name]

    def stays(self, name: str) -> bool:
        """Whether the tensor need not be recomputed: it is live after the forward pass, or nothing
        needs it after that."""
        return not self.saved_at_depths(name) or 0 in self.saved_at_depths(name)

    def saved_in(self, region: CheckpointRegion) -> list[str]:
        """The tensors that are saved in the region itself, so that recomputing it restores them:
        what its backward needs, and arguments of inner regions."""
        depth = self._depth[region.path]
        return [
            name for name in self.outputs_of(region.nodes) if depth in self.saved_at_depths(name)
        ]

    def n_nodes_recomputed(self, region: CheckpointRegion) -> int:
        """How many of the region's nodes a recomputation runs until everything is saved again.

        An operator saves its inputs before it runs, and its outputs afterwards. It is not known
        which operator of the forward pass a backward node belongs to: the last one in the same
        module that reads or makes the tensor is assumed.
        """
        if not region.stops_early:
            return len(region.nodes)
        n_run = 0
        saved = set(self.saved_in(region))
        for position, name in enumerate(region.nodes):
            node = self.graph.node_by_name[name]
            if not saved.isdisjoint(node.outputs):
                n_run = position + 1
            innermost = self.around(name)[-1]
            if innermost is not region:
                if innermost.nodes[0] == name:  # its arguments are saved before it runs
                    n_run = max(n_run, position)
            elif not self._read_later[node.module, region.path].isdisjoint(node.inputs):
                n_run = max(n_run, position)
        return n_run

    def arguments(self, region: CheckpointRegion) -> list[str]:
        """The tensors made in the step, outside the region, that the region reads."""
        made = set(self.outputs_of(region.nodes))
        read = (name for node in region.nodes for name in self.graph.node_by_name[node].inputs)
        return [n for n in dict.fromkeys(read) if n not in made and n in self.graph.producer]


def n_common_regions(one: Nesting, other: Nesting) -> int:
    """How many regions, counted from the outermost, the two have in common."""
    depth = 0
    for a, b in zip(one, other, strict=False):
        if a is not b:
            break
        depth += 1
    return depth
