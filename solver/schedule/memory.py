"""What the bytes on the device are: by category at one position, by layer over the whole step.

The simulator says how many bytes are on the device. Here they are told apart, by its rules, so that
the parts add up to its figure: by `Tensor.kind` for the report's breakdown, and by what the plan
does with them (resident, kept, recomputed) for the memory plot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphs.graph import Graph, Node
from solver.schedule.ops import Compute, Schedule
from solver.schedule.simulator import Simulation

CATEGORY_OF_KIND: Mapping[str, str] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer",
    "buffer": "buffers",
    "input": "batch",
    "activation": "activations",
    "tangent": "activations",
    "output": "activations",
}
CATEGORIES = (*dict.fromkeys(CATEGORY_OF_KIND.values()), "workspace")


def memory_at(graph: Graph, schedule: Schedule, position: int | None) -> dict[str, int]:
    """Bytes of each of CATEGORIES during the op at `position` of a legal schedule.

    position: an index into `schedule.ops`; None: before the first op. The sum is the judge's
    `live_bytes` there. Cost: linear in the position.
    """
    parts = dict.fromkeys(CATEGORIES, 0)
    for tensor in graph.resident:
        if tensor.alias_of is None:
            parts[CATEGORY_OF_KIND[tensor.kind]] += tensor.size_bytes
    if position is None:
        return parts
    last = schedule.ops[position]
    if isinstance(last, Compute):
        node = graph.node_by_name[last.node]
        parts["workspace"] = node.workspace_bytes
        held = held_before(graph, schedule, position)
        # An output that is still there from before counts twice.
        held += tuple(name for name in node.outputs if graph.root(name) == name)
    else:
        held = held_before(graph, schedule, position + 1)
    for name in held:
        tensor = graph.tensor_by_name[name]
        parts[CATEGORY_OF_KIND[tensor.kind]] += tensor.size_bytes
    return parts


def held_before(graph: Graph, schedule: Schedule, position: int) -> tuple[str, ...]:
    """The storages made in the step that are on the device before the op at `position`."""
    holders: dict[str, set[str]] = {}  # storage -> tensors on it that are there
    for op in schedule.ops[:position]:
        if isinstance(op, Compute):
            for name in graph.node_by_name[op.node].outputs:
                holders.setdefault(graph.root(name), set()).add(name)
        else:
            holders[graph.root(op.tensor)].discard(op.tensor)
    return tuple(root for root, names in holders.items() if names and root in graph.producer)


def held_at_turn(graph: Graph, schedule: Schedule) -> frozenset[str]:
    """The storages on the device when the first op after the forward pass is about to run."""
    later = {node.name for node in graph.later_nodes}
    turn = next(
        (p for p, op in enumerate(schedule.ops) if isinstance(op, Compute) and op.node in later),
        len(schedule.ops),
    )
    return frozenset(held_before(graph, schedule, turn))


def node_at(graph: Graph, schedule: Schedule, simulation: Simulation) -> Node | None:
    """The node during which the peak stands (None: only what is resident counts)."""
    if simulation.peak_op is None:
        return None
    op = schedule.ops[simulation.peak_op]
    return graph.node_by_name[op.node] if isinstance(op, Compute) else graph.producer[op.tensor]


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
