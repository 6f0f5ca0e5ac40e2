"""What the bytes on the device are at every op of a schedule: the layers of the memory plot.

`breakdown` tells parameters from activations at one moment; here it is told, for every moment,
what the plan has to do with a byte: whether it is there anyway, was kept, or was made again. The
rules are the judge's, so the layers add up to its `live_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphs.graph import Graph, Node
from solver.schedule import Compute, Schedule

LAYERS = ("resident", "kept", "recomputed", "gradients", "workspace")
"""resident: there for the whole step (accumulated gradients too). kept: made by the first run of a
forward op, or by the caller's loss. recomputed: made by a later run. gradients: made by the
backward pass, of weights and of activations. workspace: inside the op that runs."""


@dataclass(frozen=True)
class Occupancy:
    """By compute of a schedule, in its order.

    nodes: what runs. edges_s: when each starts, and the end of the last: one more than nodes.
    layer_bytes: for each of LAYERS, the bytes while the op runs.
    """

    nodes: tuple[Node, ...]
    edges_s: tuple[float, ...]
    layer_bytes: Mapping[str, tuple[int, ...]]

    @property
    def total_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(self.layer_bytes[name] for name in LAYERS), strict=True)))


def occupancy(graph: Graph, schedule: Schedule) -> Occupancy:
    """The layers of a legal schedule; linear in its length."""
    device = _Layers(graph)
    nodes: list[Node] = []
    edges_s = [0.0]
    rows: list[dict[str, int]] = []
    for op in schedule.ops:
        if isinstance(op, Compute):
            node = graph.node_by_name[op.node]
            rows.append(device.compute(node))
            nodes.append(node)
            edges_s.append(edges_s[-1] + node.time_s)
        else:
            device.free(op.tensor)
    layers = {name: tuple(row[name] for row in rows) for name in LAYERS}
    return Occupancy(nodes=tuple(nodes), edges_s=tuple(edges_s), layer_bytes=layers)


class _Layers:
    """What is on the device, told apart by layer."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._bytes = dict.fromkeys(LAYERS, 0)
        self._bytes["resident"] = graph.resident_bytes
        self._layer_of: dict[str, str] = {}  # storage that is there -> its layer
        self._holders: dict[str, set[str]] = {}  # storage -> tensors on it that are there
        self._ran: set[str] = set()

    def compute(self, node: Node) -> dict[str, int]:
        """Run the node; the bytes of each layer while it runs."""
        layer = self._layer(node)
        made = [name for name in node.outputs if self._graph.root(name) == name]
        before = dict(self._bytes)
        for name in made:
            size_bytes = self._graph.tensor_by_name[name].size_bytes
            before[layer] += size_bytes
            self._bytes[layer] += size_bytes
            old = self._layer_of.get(name)
            if old is not None:  # still there from before: two copies while the node runs
                self._bytes[old] -= size_bytes
            self._layer_of[name] = layer
        for name in node.outputs:
            self._holders.setdefault(self._graph.root(name), set()).add(name)
        self._ran.add(node.name)
        return {**before, "workspace": node.workspace_bytes}

    def free(self, name: str) -> None:
        root = self._graph.root(name)
        self._holders[root].discard(name)
        if not self._holders[root] and root in self._layer_of:
            layer = self._layer_of.pop(root)
            self._bytes[layer] -= self._graph.tensor_by_name[root].size_bytes

    def _layer(self, node: Node) -> str:
        if node.phase in ("backward", "optimizer"):
            return "gradients"
        return "recomputed" if node.name in self._ran else "kept"
