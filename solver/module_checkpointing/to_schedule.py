"""A step with checkpointed regions, as a schedule; the rules are in `regions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphs.graph import Graph, Node, is_under
from solver.module_checkpointing.eager import EagerStep
from solver.module_checkpointing.regions import (
    Chain,
    Region,
    RegionError,
    RegionLayout,
    is_recomputed,
    n_common,
)
from solver.schedule import Schedule, free_after_last_use


@dataclass(frozen=True)
class RegionsSchedule:
    """schedule: for the judge. n_reruns: path -> how often its region runs again in a step."""

    schedule: Schedule
    n_reruns: Mapping[str, int]


def schedule_from_regions(
    graph: Graph, regions: Sequence[Region], *, locals_held: bool = True
) -> RegionsSchedule:
    """The step when these disjoint regions are checkpointed. Raises RegionError.

    locals_held: rule 6. False for regions whose code is a loop over their modules with one
    variable (nn.Sequential): then only the arguments of a region are held while it runs.

    Cost: linear in the number of operators that run, times the depth of regions.
    """
    return _Replay(graph, RegionLayout(graph, regions), locals_held=locals_held).run()


class _Replay:
    """Runs the step on paper, collecting the order of nodes and who holds what until when."""

    def __init__(self, graph: Graph, layout: RegionLayout, *, locals_held: bool) -> None:
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

    def run(self) -> RegionsSchedule:
        graph, layout = self._graph, self._layout
        for region in (r for top in layout.regions for r in top.flat()):
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
        for region in (r for top in layout.regions for r in top.flat()):
            if region.path in self._last_backward:
                self._held[self._last_backward[region.path]] += layout.arguments(region)
        schedule = free_after_last_use(graph, self._order, held=self._held)
        return RegionsSchedule(schedule=schedule, n_reruns=self._n_reruns)

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
        depth = n_common(made_in, reader)
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
        for name in region.nodes[: self._layout.n_recomputed(region)]:
            if self._is_recomputed(name, region):
                self._order.append(name)
        emitted = self._order[start:]
        self._hold_locals(start)
        for inside in region.flat():
            self._n_reruns[inside.path] += not set(emitted).isdisjoint(inside.nodes)
        self._available.update(wanted)

    def _is_recomputed(self, name: str, region: Region) -> bool:
        """`is_recomputed`, and False for what is still there."""
        outputs = self._graph.node_by_name[name].outputs
        if outputs and all(o in self._available and self._left_readers[o] for o in outputs):
            return False  # the framework would make a second copy, which is dropped at once
        return is_recomputed(self._graph, name, region)

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
