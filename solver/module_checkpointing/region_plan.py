"""The schedule of a step with checkpointed regions; the rules are in `regions`."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from graphs.graph import (
    Graph,
    Node,
    as_eager,
    is_under,
    with_dead_code,
    without_random_states,
)
from graphs.hardware import is_collective
from solver.module_checkpointing.eager_effects import EagerStep
from solver.module_checkpointing.recomputation import Recomputation
from solver.module_checkpointing.regions import (
    CheckpointRegion,
    Nesting,
    RegionError,
    RegionLayout,
    n_common_regions,
)
from solver.schedule import Schedule, Simulation, baseline, free_after_last_use, simulate

ExtraBytes: TypeAlias = Callable[[CheckpointRegion], int]
"""A region -> bytes that the framework holds for its checkpointed call and the graph does not show.
"""


@dataclass(frozen=True)
class RegionPlan:
    """Checkpointed regions, and the step that they give.

    regions: disjoint, in order.
    in_loop: a loop over the children of an nn.Sequential runs the regions.
    n_recomputations: path -> how often a step recomputes that region.
    schedule, simulation: the whole step; in-place operators of eager mode allocate nothing.
    extra_bytes: bytes that the framework holds for checkpointed calls and the graph does not show.
    refused: path -> why that module cannot be checkpointed.
    """

    regions: tuple[CheckpointRegion, ...]
    in_loop: bool
    n_recomputations: Mapping[str, int]
    schedule: Schedule = field(repr=False)
    simulation: Simulation
    extra_bytes: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes + self.extra_bytes

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key: faster plans first, of equally fast ones the one with the smaller peak."""
        return self.simulation.time_s, self.peak_bytes


def plan_regions(
    graph: Graph,
    regions: Sequence[CheckpointRegion],
    *,
    in_loop: bool = False,
    extra_bytes: ExtraBytes | None = None,
) -> RegionPlan:
    """Build and simulate the step in which these disjoint regions are checkpointed.

    in_loop: the regions run in a loop over modules with a single variable (nn.Sequential). Then
        only a region's arguments are held while it runs, instead of what rule 6 says.
    extra_bytes: bytes that the framework holds for a region and the graph does not show; they
        replace the graph's own random states. None: none but the graph's random states.

    Raises RegionError if a region cannot be recomputed, or drops its output.

    Cost: linear in the number of operators that run, times the depth of regions.
    """
    if any(region.drops_output for region in regions):
        raise RegionError("stock checkpoints keep the output of a region; give it to `forecast`")
    graph_id, graph = graph.graph_id, with_dead_code(graph)
    extra = [0]
    if extra_bytes is not None:
        graph = without_random_states(graph)
        extra += [extra_bytes(region) for top in regions for region in top.flat()]
    n_recomputations: Mapping[str, int] = {}
    if regions:
        step = _Step(graph, RegionLayout(graph, regions), in_loop=in_loop)
        step.run()
        eager, n_recomputations = _with_backward_in_place(graph), step.n_recomputations
        schedule = free_after_last_use(eager, step.order, held=step.held)
    else:  # the step as PyTorch runs it without checkpoints
        eager = as_eager(graph)
        schedule = baseline(eager)
    return RegionPlan(
        regions=tuple(regions),
        in_loop=in_loop,
        n_recomputations=n_recomputations,
        schedule=replace(schedule, graph_id=graph_id),
        simulation=simulate(eager, schedule),
        # While a region is recomputed, the interrupted code's state is held as well: up to the
        # largest of them.
        extra_bytes=graph.n_in_flight * sum(extra) + max(extra),
    )


def _with_backward_in_place(graph: Graph) -> Graph:
    """The graph with the backward pass's in-place results, such as sums of gradients, as aliases.

    In-place results of the forward pass stay separate, as recomputing makes each tensor anew.
    """
    eager = as_eager(graph)
    later = {name for node in graph.later_nodes for name in node.outputs}
    tensors = tuple(
        in_place if separate.name in later and in_place.alias_of in later else separate
        for separate, in_place in zip(graph.tensors, eager.tensors, strict=True)
    )
    return replace(graph, tensors=tensors)


class _Step:
    """Walk through the step and collect the order of nodes, and what is held until when.

    order: the nodes in the order in which they run.
    held: position in `order` -> tensors that Python code, an autograd function or a region holds
        while that node runs.
    n_recomputations: path of each region -> how often it is recomputed.
    """

    def __init__(self, graph: Graph, layout: RegionLayout, *, in_loop: bool) -> None:
        self.order: list[str] = []
        self.held: defaultdict[int, list[str]] = defaultdict(list)
        self.n_recomputations = {region.path: 0 for region in layout.all_regions}
        self._graph = graph
        self._layout = layout
        self._in_loop = in_loop
        self._recomputations = {
            region.path: Recomputation.of(layout, region) for region in layout.all_regions
        }
        self._available: set[str] = {tensor.name for tensor in graph.resident}
        self._recomputed: set[str] = set()  # paths of regions that have been recomputed
        # path of a region -> its saved nodes whose results its recomputation has used
        self._reused_saved: defaultdict[str, set[str]] = defaultdict(set)
        self._readers_left = {name: 0 for node in graph.forward_nodes for name in node.outputs}
        for node in graph.later_nodes:
            for name in self._reads(node.name):
                if name in self._readers_left:
                    self._readers_left[name] += 1

    def run(self) -> None:
        """Walk through the forward pass, then the backward pass; fills `order` and `held`."""
        graph, layout = self._graph, self._layout
        self.order += [node.name for node in graph.forward_nodes]
        self._hold_while_called(0)
        for position, node in enumerate(graph.forward_nodes):
            self.held[position] += layout.held_by_variables(node.name)
        for node in graph.forward_nodes:
            self._available.update(name for name in node.outputs if layout.stays(name))
        function_of = EagerStep.of(graph).function_of
        last_backward: dict[str, int] = {}
        for node in graph.later_nodes:
            # Rule 5: a function unpacks all it needs before its first node, and holds it to its
            # last, unless it is known to drop it earlier.
            function = function_of.get(node.name, (node.name,))
            if node.name == function[0]:
                self._unpack(function)
            for region in layout.around(node.name):
                last_backward[region.path] = len(self.order)
            self.held[len(self.order)] += self._held_until(node.name, function)
            self.order.append(node.name)
            self._available.update(node.outputs)
            for name in self._reads(node.name):
                if name in self._readers_left:
                    self._readers_left[name] -= 1
        # Rules 1 and 3: arguments, and saved results that no recomputation has used, stay until
        # the region's backward is done.
        for region in layout.all_regions:
            if region.path in last_backward:
                held = self.held[last_backward[region.path]]
                held += layout.arguments(region)
                for name, kept in (
                    self._recomputations[region.path].kept_outputs(region.saved).items()
                ):
                    held += () if name in self._reused_saved[region.path] else kept

    def _reads(self, later: str) -> tuple[str, ...]:
        """What a node of the backward pass reads, and what is saved for it without being read."""
        node = self._graph.node_by_name[later]
        return tuple(dict.fromkeys((*node.inputs, *self._layout.held_unread(later))))

    def _made_and_read_by(self, function: Iterable[str]) -> list[str]:
        """The tensors made in the step that these nodes read, or that are saved for them."""
        read = (name for each in function for name in self._reads(each))
        return [name for name in dict.fromkeys(read) if name in self._graph.producer]

    def _held_until(self, node: str, function: Sequence[str]) -> list[str]:
        """The tensors that this autograd function reads and holds until this one of its nodes."""
        dropped, last = self._graph.meta.dropped, function[-1]
        until = {each: each for each in function}
        return [
            name
            for name in self._made_and_read_by(function)
            if until.get(dropped.get(name, last), last) == node
        ]

    def _unpack(self, function: Sequence[str]) -> None:
        """Make all tensors of the forward pass available that this autograd function unpacks."""
        graph = self._graph
        around = self._layout.around(function[0])
        if around and around[-1].path not in self._recomputed:
            read = {name for each in function for name in self._reads(each)}
            if any(self._was_saved(name) for name in read):
                self._recompute(around)
        for name in self._made_and_read_by(function):
            if name not in self._available and graph.producer[name].phase == "forward":
                self._restore(name, around)

    def _was_saved(self, name: str) -> bool:
        """Whether autograd saved the tensor in the forward pass: it exists before backward."""
        maker = self._graph.producer.get(name)
        if maker is None:
            return self._graph.tensor_by_name[name].kind in ("parameter", "buffer", "input")
        return maker.phase == "forward"

    def _restore(self, name: str, reader: Nesting) -> None:
        """Recompute the innermost region that contains both the tensor's maker and its reader.

        reader: the regions around the reader.
        """
        made_in = self._layout.around(self._graph.producer[name].name)
        depth = n_common_regions(made_in, reader)
        if not depth:
            raise RegionError(f"tensor {name!r} is missing outside of all regions")
        self._recompute(made_in[:depth])
        if name not in self._available:
            raise RegionError(f"recomputing region {made_in[depth - 1].path!r} misses {name!r}")

    def _recompute(self, around: Nesting) -> None:
        """Recompute the innermost of these nested regions, and the outer ones if necessary."""
        graph, layout = self._graph, self._layout
        *outside, region = around
        self._recomputed.add(region.path)
        if outside and outside[-1].path not in self._recomputed:  # where its arguments were saved
            self._recompute(tuple(outside))
        for name in layout.arguments(region):
            if name not in self._available:
                self._restore(name, tuple(outside))
        restored = layout.saved_in(region)
        start = len(self.order)
        recomputation = self._recomputations[region.path]
        kept = recomputation.kept_outputs(region.saved)
        for node in recomputation.nodes_to_run(region.saved):
            outputs = graph.node_by_name[node].outputs
            # If all outputs are still live, the framework recomputes the node too, but drops the
            # result at once: leave it out of the order.
            is_live = outputs and all(
                o in self._available and self._readers_left[o] for o in outputs
            )
            if not is_live:
                self.order.append(node)
        self._hold_while_called(start)
        for node in region.nodes[: layout.n_nodes_recomputed(region)]:
            if node in kept:
                self._reused_saved[region.path].add(node)
                self.held[len(self.order) - 1] += kept[node]
        recomputed = set(self.order[start:])
        for inside in region.flat():
            self.n_recomputations[inside.path] += not recomputed.isdisjoint(inside.nodes)
        self._available.update(restored)

    def _hold_while_called(self, start: int) -> None:
        """Rule 6: hold what ran from position `start` on in regions while variables refer to it."""
        graph, layout = self._graph, self._layout
        nodes_run = [(p, graph.node_by_name[self.order[p]]) for p in range(start, len(self.order))]
        if self._in_loop:
            last_in = {
                region.path: (region, position)
                for position, node in nodes_run
                for region in layout.around(node.name)
            }
            for region, position in last_in.values():
                self.held[position] += layout.arguments(region)
            return
        if graph.meta.held_in_calls is not None:
            self._hold_as_rehearsed(nodes_run, graph.meta.held_in_calls)
            return
        last_of: dict[str, int] = {}  # path of a module, or a parent -> position of its last node
        for position, node in nodes_run:
            path = node.module
            while path:
                last_of[path] = position
                path = path.rpartition(".")[0]
            last_of[""] = position
        for _, node in nodes_run:
            if layout.around(node.name) and not self._is_passed_on(node):
                self.held[last_of[self._scope(node)]] += node.outputs

    def _hold_as_rehearsed(
        self, nodes_run: Sequence[tuple[int, Node]], held: Mapping[str, Sequence[str]]
    ) -> None:
        """Hold tensors as long as variables did in the rehearsal (`GraphMeta.held_in_calls`).

        A recomputation leaves nodes out. So a tensor is held until the last node of `nodes_run`
        that is not after the one until which a variable held it.
        """
        number_of = {node.name: number for number, node in enumerate(self._graph.forward_nodes)}
        last = len(number_of)  # if a rewrite has replaced the node until which it is held
        held_until = {name: number_of.get(n, last) for n, names in held.items() for name in names}
        positions = sorted((number_of[node.name], position) for position, node in nodes_run)
        numbers = [number for number, _ in positions]
        for _, node in nodes_run:
            for name in node.outputs if self._layout.around(node.name) else ():
                if name in held_until:
                    at = bisect.bisect_right(numbers, held_until[name]) - 1
                    self.held[positions[at][1]].append(name)

    def _is_passed_on(self, node: Node) -> bool:
        """Whether the node's output goes straight into or out of a collective, whose code keeps no
        variable for it: the input of a collective, or its parts before they are concatenated."""
        readers = [r for name in node.outputs for r in self._graph.consumers[name]]
        readers = [reader for reader in readers if reader.phase == "forward"]
        if not readers or any(reader.module != node.module for reader in readers):
            return False
        joins = all(reader.op == "aten.cat.default" for reader in readers)
        return all(is_collective(r.op) for r in readers) or (is_collective(node.op) and joins)

    def _scope(self, node: Node) -> str:
        """The path of the innermost module that contains the node and all readers in its region."""
        outermost = self._layout.around(node.name)[0]
        scope = node.module
        for name in node.outputs:
            for reader in self._graph.consumers[name]:
                around = self._layout.around(reader.name)
                if reader.phase == "forward" and around and around[0] is outermost:
                    while not is_under(reader.module, scope):
                        scope = scope.rpartition(".")[0]
        return scope
