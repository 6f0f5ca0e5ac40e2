"""The step as numbered nodes and storages, which bounds, the ILP and `auto` use for the graph.

Tensors are folded into storages, called units here: a unit is on the device when any tensor on it
is. A node reads the units of its inputs and those of which it makes an alias, and it makes the
units whose root tensor it outputs. Tensors on resident storage drop out, since they are always
there. Folding ignores that a view has to be taken again and that an alias alone does not serve a
reader of another alias. That only relaxes, so every bound on the folded step is a bound on the
graph.

All bounds rest on these facts about a legal schedule and the position at which node p is computed
for the first time. (The simulator fixes the order of first computations, so exactly nodes 0 .. p-1
have been computed.)

- A later node (phase outside, backward, optimizer) is never recomputed. What it made before p and
  what a node from p on, or the end, still reads is on the device now.
- A forward unit made before p that a node from p on, or the end, still reads is on the device now
  or its maker is recomputed after this position. If p reads it, it is on the device now.
- Within a span without recomputation (`find_no_recompute_spans`) that begins at p, the maker of its
  storage is not recomputed. So what else it made and a node up to the end of the span reads is on
  the device now, as if p read it, and stays.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphs.graph import Graph, Node

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StorageGraph:
    """The folded graph. Nodes and units are numbered; forward nodes are 0 .. n_forward - 1.

    By node:
    time_s, workspace_bytes: as in the graph.
    recomputable: whether it may run more than once.
    no_recompute: spans (first, last); it is not recomputed between the first runs of nodes
        first - 1 and last.
    reads, makes: units.

    By unit:
    unit_names: the root tensor.
    unit_bytes: its size.
    maker: the node that makes it.
    uses: the nodes that read it, in order, and n_nodes (the end) if it holds an output of the
        graph.
    pinned: spans (first, last) of nodes during which it must be on the device in any schedule.
    """

    graph: Graph
    n_forward: int
    time_s: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    recomputable: tuple[bool, ...]
    no_recompute: Mapping[int, Sequence[tuple[int, int]]]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    unit_names: tuple[str, ...]
    unit_bytes: tuple[int, ...]
    maker: tuple[int, ...]
    uses: tuple[tuple[int, ...], ...]
    pinned: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, graph: Graph, *, may_offload: bool = False) -> StorageGraph:
        """Fold the graph, in time linear in its size.

        may_offload: storages may be away, in host memory or on disk, and come back by a copy. Then
            nothing is pinned, and since an alias may be away while its storage is recomputed, every
            recomputable node may be recomputed at any time.
        """
        roots = [
            (name, p)
            for p, node in enumerate(graph.nodes)
            for name in node.outputs
            if graph.root(name) == name
        ]
        unit = {name: u for u, (name, _) in enumerate(roots)}
        maker = tuple(p for _, p in roots)
        n_forward = len(graph.forward_nodes)

        def units_of(names: Iterable[str]) -> tuple[int, ...]:
            found = (unit.get(graph.root(name)) for name in names)
            return tuple(dict.fromkeys(u for u in found if u is not None))

        reads = [units_of(graph.needs[node.name]) for node in graph.nodes]
        makes = tuple(
            units_of(name for name in node.outputs if graph.root(name) == name)
            for node in graph.nodes
        )
        uses: list[list[int]] = [[] for _ in roots]
        for p, read in enumerate(reads):
            for u in read:
                uses[u].append(p)
        for u in units_of(graph.outputs):
            uses[u].append(len(graph.nodes))
        recomputable = tuple(map(may_run_again, graph.nodes))
        # What cannot be recomputed stays from the end of its maker to its last use.
        pinned = [
            [(p + 1, uses[u][-1])]
            if not may_offload and not recomputable[p] and uses[u] and uses[u][-1] > p
            else []
            for u, p in enumerate(maker)
        ]
        no_recompute: dict[int, list[tuple[int, int]]] = {}
        for root, first, last in () if may_offload else find_no_recompute_spans(graph):
            p = maker[unit[root]]
            no_recompute.setdefault(p, []).append((first + 1, last))
            # The maker's other outputs stay up to their last use in the span, as if the node that
            # makes the alias read them.
            for u in makes[p]:
                read_in_span = [use for use in uses[u] if first < use <= last]
                if u == unit[root]:
                    pinned[u].append((first + 1, last))
                elif read_in_span:
                    pinned[u].append((first + 1, read_in_span[-1]))
                    if u not in reads[first]:
                        reads[first] += (u,)
                        insort(uses[u], first)
        return cls(
            graph=graph,
            n_forward=n_forward,
            time_s=tuple(node.time_s for node in graph.nodes),
            workspace_bytes=tuple(node.workspace_bytes for node in graph.nodes),
            recomputable=recomputable,
            no_recompute=no_recompute,
            reads=tuple(reads),
            makes=makes,
            unit_names=tuple(name for name, _ in roots),
            unit_bytes=tuple(graph.tensor_by_name[name].size_bytes for name, _ in roots),
            maker=maker,
            uses=tuple(tuple(positions) for positions in uses),
            pinned=tuple(map(_merge_spans, pinned)),
        )

    @property
    def n_nodes(self) -> int:
        return len(self.time_s)

    @property
    def n_units(self) -> int:
        return len(self.unit_bytes)

    def is_output(self, u: int) -> bool:
        """Whether unit u holds an output of the graph."""
        return self.n_nodes in self.uses[u][-1:]

    def may_be_stored(self, u: int) -> bool:
        """Whether the rules of a schedule allow that unit u is copied to the host."""
        return self.graph.tensor_by_name[self.unit_names[u]].copyable and not self.is_output(u)

    @cached_property
    def unit_of(self) -> dict[str, int]:
        """By name of a tensor that a node makes, its unit; views of resident tensors have none."""
        unit = {name: u for u, name in enumerate(self.unit_names)}
        roots = ((name, self.graph.root(name)) for name in self.graph.producer)
        return {name: unit[root] for name, root in roots if root in unit}

    @cached_property
    def position(self) -> dict[str, int]:
        """The number of each node, by name."""
        return {node.name: n for n, node in enumerate(self.graph.nodes)}

    @cached_property
    def held_bytes(self) -> Bytes:
        """By position p = 0 .. n_nodes: bytes that any schedule holds beside what p itself needs.

        These are resident tensors and pinned units, on the device from the end of node p - 1 on.
        What p reads (unless pinned), makes and takes as workspace is not counted. Position n_nodes
        is the end of the step.
        """
        change = np.zeros(self.n_nodes + 2, dtype=np.int64)
        for u, spans in enumerate(self.pinned):
            for first, last in spans:
                change[first] += self.unit_bytes[u]
                change[last + 1] -= self.unit_bytes[u]
        return self.graph.resident_bytes + np.cumsum(change)[:-1]

    @cached_property
    def own_bytes(self) -> Bytes:
        """By position: bytes that the node makes, and its workspace; 0 at the end of the step."""
        own = [
            sum(self.unit_bytes[u] for u in made) + workspace
            for made, workspace in zip(self.makes, self.workspace_bytes, strict=True)
        ]
        return np.array([*own, 0], dtype=np.int64)

    @cached_property
    def least_bytes(self) -> Bytes:
        """By position p: the least bytes on the device while p runs, over all schedules."""
        least = self.held_bytes + self.own_bytes
        for p, read in enumerate(self.reads):
            least[p] += sum(self.unit_bytes[u] for u in read if not self.is_pinned(u, p))
        return least

    @cached_property
    def baseline_bytes(self) -> Bytes:
        """By position p: bytes on the device while p runs in the baseline.

        There each node runs once, and every unit is freed after its last use.
        """
        change = np.zeros(self.n_nodes + 2, dtype=np.int64)
        for u, positions in enumerate(self.uses):
            if positions:
                change[self.maker[u] + 1] += self.unit_bytes[u]
                change[positions[-1] + 1] -= self.unit_bytes[u]
        live: Bytes = np.cumsum(change)[:-1]
        return live + self.graph.resident_bytes + self.own_bytes

    @property
    def least_saved_bytes(self) -> int:
        """Bytes that every schedule saves for backward: on the device when the forward pass ends,
        without resident tensors."""
        return int(self.held_bytes[self.n_forward]) - self.graph.resident_bytes

    @property
    def made_bytes(self) -> int:
        """Bytes that the forward pass makes: the most that a schedule can save for backward."""
        return sum(self.unit_bytes[u] for made in self.makes[: self.n_forward] for u in made)

    def is_pinned(self, u: int, p: int) -> bool:
        return any(first <= p <= last for first, last in self.pinned[u])

    def needed_names(self, p: int) -> list[str]:
        """Names of the tensors that must be on the device when node p runs for the first time."""
        names = self.graph.needs[self.graph.nodes[p].name]
        known = {self.unit_of[name] for name in names if name in self.unit_of}
        return [*names, *(self.unit_names[u] for u in self.reads[p] if u not in known)]

    def nodes_to_make(self, units: Iterable[int], *, is_there: Callable[[int], bool]) -> set[int]:
        """Nodes to run to have these units: their makers and, recursively, those of missing inputs.

        is_there: whether a unit is on the device, so that nothing has to run for it.
        """
        found: set[int] = set()
        unchecked = list(units)
        while unchecked:
            u = unchecked.pop()
            maker = self.maker[u]
            if maker not in found and not is_there(u):
                found.add(maker)
                unchecked += self.reads[maker]
        return found

    def must_be_on_device(self, u: int, p: int) -> bool:
        """Whether unit u is on the device while node p runs in every schedule."""
        return self.is_pinned(u, p) or (p < self.n_nodes and u in self.reads[p])

    @cached_property
    def last_useful_position(self) -> tuple[int, ...]:
        """By forward node: the last position for which its outputs can be of use.

        That is directly, or through any number of recomputations.
        """
        readers: list[list[int]] = [[] for _ in range(self.n_units)]
        for n in range(self.n_forward):
            for u in self.reads[n]:
                readers[u].append(n)
        last = [0] * self.n_forward
        for n in reversed(range(self.n_forward)):
            outputs = self.graph.nodes[n].outputs
            for u in {self.unit_of[name] for name in outputs if name in self.unit_of}:
                through = (last[m] for m in readers[u] if m > n and self.recomputable[m])
                last[n] = max((last[n], *self.uses[u][-1:], *through))
        return tuple(last)

    def may_recompute(self, *, after: int, before: int, budget_bytes: int) -> npt.NDArray[np.bool_]:
        """By forward node: whether any schedule can recompute it between these two positions.

        A recomputation runs between two first runs, beside what is held from one to the next, and
        at a position before `last_useful_position`. If it fits at none of these, the node's outputs
        are kept or never used again.
        before: n_nodes + 1 for up to the end of the step.
        """
        may = np.array(self.recomputable[: self.n_forward], dtype=bool)
        least_held: Bytes = np.minimum.accumulate(self.held_bytes[after + 1 : before + 1])
        for n in range(self.n_forward):
            if not may[n]:
                continue
            # The least bytes held at any position at which the run can still be of use.
            window = min(self.last_useful_position[n], before) - after - 1
            window = min(window, len(least_held) - 1)
            may[n] = window >= 0 and least_held[window] + self.run_bytes[n] <= budget_bytes
            if may[n] and n in self.no_recompute:
                fits = self.held_bytes[: after + window + 2] + self.run_bytes[n] <= budget_bytes
                for first, last in self.no_recompute[n]:
                    fits[first : last + 1] = False
                may[n] = fits[after + 1 :].any()
        return may

    def cannot_recompute(self, n: int, p: int) -> bool:
        """Whether node n cannot be recomputed between the first runs of nodes p - 1 and p."""
        return any(first <= p <= last for first, last in self.no_recompute.get(n, ()))

    @cached_property
    def run_bytes(self) -> Bytes:
        """By forward node: bytes of its outputs, workspace, and inputs that are never pinned."""
        return np.array(
            [
                self.own_bytes[n]
                + sum(self.unit_bytes[u] for u in self.reads[n] if not self.pinned[u])
                for n in range(self.n_forward)
            ],
            dtype=np.int64,
        )


def find_no_recompute_spans(graph: Graph) -> Iterator[tuple[str, int, int]]:
    """Yield the spans of a step in which a forward node cannot be recomputed by any schedule.

    A storage cannot be recomputed while an alias still holds the old one. If the alias is made by a
    node that runs only once (a view or an in-place overwrite in the backward pass), it cannot be
    freed before its last use. Until then the node that made the storage cannot be recomputed, and
    neither can its other outputs. Nodes that cannot be recomputed anywhere are left out.

    Each is (root, first, last): the storage, the position of the node that makes the alias, and
    that of its last use (n_nodes: the end of the step). The root's maker is not recomputed between
    the first runs of these two nodes.
    """
    position = {node.name: p for p, node in enumerate(graph.nodes)}
    outputs = set(graph.outputs)
    for root, aliases in graph.views.items():
        for alias in aliases:
            once, maker = graph.producer[alias], graph.producer.get(root)
            if maker is None or maker is once or may_run_again(once) or not may_run_again(maker):
                continue
            last = max((position[node.name] for node in graph.consumers[alias]), default=-1)
            last = len(graph.nodes) if alias in outputs else last
            if last > position[once.name]:
                yield root, position[once.name], last


def may_run_again(node: Node) -> bool:
    return node.phase == "forward" and node.recomputable


def _merge_spans(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge spans that overlap or touch, so that no byte is counted twice."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)
