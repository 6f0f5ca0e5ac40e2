"""Break down the bytes on the device: by category at one position, by layer over the whole step.

The simulator says which storages are on the device at which time (`stays`). Here their bytes are
added up: by `Tensor.kind` for the report's breakdown, and by layer (kept, recomputed, gradients)
for the memory plot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import TypeVar

from graphs.graph import Graph, Node, Tensor
from solver.schedule.host_and_disk import Places
from solver.schedule.ops import (
    Compute,
    Delete,
    Drop,
    Load,
    Schedule,
    Spill,
    Store,
    name_in,
    other_micro_batch_bytes,
)
from solver.schedule.simulator import Simulation, Stay, starts_s, stays

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
OTHER_MICRO_BATCHES = "others in flight"
"""The category of what the other micro-batches in flight hold."""
CATEGORIES = (*dict.fromkeys(CATEGORY_OF_KIND.values()), "workspace")


def memory_at(graph: Graph, schedule: Schedule, position: int | None) -> dict[str, int]:
    """Category -> bytes during one op of a legal schedule.

    The categories are CATEGORIES, and OTHER_MICRO_BATCHES if other micro-batches are in flight.
    They add up to the simulation's `live_bytes` at this position. What a card holds besides tensors
    (`meta.device_bytes`) counts as workspace.

    position: an index into `schedule.ops` (None: before the first op).

    Cost: one simulation, two with other micro-batches in flight.
    """
    parts = dict.fromkeys(CATEGORIES, 0)
    if position is not None and isinstance(op := schedule.ops[position], Compute):
        parts["workspace"] += graph.node_by_name[op.node].workspace_bytes
    for tensor in _storages_at(graph, schedule, position):
        parts[_category(graph, tensor)] += tensor.size_bytes
    if graph.n_in_flight > 1:
        parts[OTHER_MICRO_BATCHES] = (
            0 if position is None else _other_micro_batch_bytes(graph, schedule)[position]
        )
    return parts


def activation_bytes_by_dtype(
    graph: Graph, schedule: Schedule, position: int | None
) -> dict[str, int]:
    """Dtype -> bytes of the activations that `memory_at` counts, the most bytes first.

    "unknown" stands for tensors whose dtype the graph does not record. Empty if the graph records
    no dtypes at all.
    """
    dtype_of = graph.meta.dtype_of
    found: Counter[str] = Counter()
    for tensor in _storages_at(graph, schedule, position) if dtype_of else ():
        if _category(graph, tensor) == "activations" and tensor.size_bytes:
            found[dtype_of.get(tensor.name, "unknown")] += tensor.size_bytes
    return dict(found.most_common())


def _storages_at(graph: Graph, schedule: Schedule, position: int | None) -> list[Tensor]:
    """The storages on the device during the op at this position.

    An output that the op replaces is listed twice, since both its old and new bytes count.
    """
    storages = [tensor for tensor in graph.resident if tensor.alias_of is None]
    if position is not None:
        storages += [
            graph.tensor_by_name[stay.storage]
            for stay in stays(graph, schedule)
            if stay.start <= position < stay.stop
        ]
    return storages


def _category(graph: Graph, tensor: Tensor) -> str:
    is_device_overhead = tensor.name in graph.meta.device_bytes
    return "workspace" if is_device_overhead else CATEGORY_OF_KIND[tensor.kind]


def _other_micro_batch_bytes(graph: Graph, schedule: Schedule) -> list[int]:
    """Bytes that the other micro-batches in flight hold during each op."""
    sizes = (graph.tensor_by_name[name].size_bytes for name in saved_for_backward(graph, schedule))
    return other_micro_batch_bytes(graph, schedule, sum(sizes))


def held_during(graph: Graph, schedule: Schedule, position: int | None) -> frozenset[str]:
    """The storages made in the step that are on the device during the op at this position.

    For a compute its outputs are included; for a free the freed storage is not. At position None,
    before the first op, there are none.
    """
    if position is None:
        return frozenset()
    found = (s.storage for s in stays(graph, schedule) if s.start <= position < s.stop)
    return frozenset(found)


def saved_for_backward(graph: Graph, schedule: Schedule) -> frozenset[str]:
    """The storages on the device when the forward pass has ended: after all forward nodes have run
    and before anything else is computed. Resident storages are not included.
    """
    n_ops = _n_forward_ops(graph, schedule)
    return held_during(graph, schedule, n_ops - 1 if n_ops else None)


def copied_out_for_backward(graph: Graph, schedule: Schedule) -> frozenset[str]:
    """The storages with a copy on the host or the disk when the forward pass has ended."""
    copies: set[tuple[str, str]] = set()
    for op in schedule.ops[: _n_forward_ops(graph, schedule)]:
        if isinstance(op, Store | Load):
            copies.add((op.storage, "host"))
        elif isinstance(op, Spill):
            copies.add((op.storage, "disk"))
        elif isinstance(op, Drop | Delete):
            copies.discard((op.storage, "host" if isinstance(op, Drop) else "disk"))
    return frozenset(storage for storage, _ in copies)


def _n_forward_ops(graph: Graph, schedule: Schedule) -> int:
    """The number of ops before the first compute that comes after all forward nodes have run."""
    missing = {node.name for node in graph.forward_nodes}
    for position, op in enumerate(schedule.ops):
        if isinstance(op, Compute):
            if not missing:
                return position
            missing.discard(op.node)
    return len(schedule.ops)


def node_at(graph: Graph, schedule: Schedule, simulation: Simulation) -> Node | None:
    """The node at the peak: the one that the peak op runs or, for a free or a copy, the one that
    made the tensor (None: the schedule has no ops)."""
    if simulation.peak_op is None:
        return None
    op = schedule.ops[simulation.peak_op]
    return graph.node_by_name[op.node] if isinstance(op, Compute) else graph.producer[name_in(op)]


LAYERS = ("resident", OTHER_MICRO_BATCHES, "kept", "recomputed", "gradients", "workspace")
"""What the memory plot distinguishes.

resident: live for the whole step (gradients too, if they are accumulated over steps).
OTHER_MICRO_BATCHES: held by other micro-batches in flight.
kept, recomputed, gradients: see `Stay`.
workspace: temporary memory inside the running op.
"""


@dataclass(frozen=True)
class Occupancy:
    """Bytes on the device during each compute of a schedule, by layer.

    nodes: the nodes that run, in order, recomputations included.
    edges_s: when each node starts, followed by the end of the step: n_nodes + 1 times.
    layer_bytes: each of LAYERS -> bytes while each node runs.
    """

    nodes: tuple[Node, ...]
    edges_s: tuple[float, ...]
    layer_bytes: Mapping[str, tuple[int, ...]]

    @property
    def total_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(self.layer_bytes[name] for name in LAYERS), strict=True)))


def occupancy(graph: Graph, schedule: Schedule, *, places: Places | None = None) -> Occupancy:
    """The bytes in each layer during each compute of a legal schedule.

    places: the host memory and disk that it copies to.

    Cost: linear in the length of the schedule.
    """
    nodes = tuple(graph.node_by_name[name] for name in schedule.order)
    layers = dict.fromkeys(LAYERS, (0,) * len(nodes))
    layers |= live_bytes_by(graph, schedule, lambda stay: str(stay.layer))
    layers["resident"] = (graph.resident_bytes,) * len(nodes)
    if graph.n_in_flight > 1:
        held = zip(schedule.ops, _other_micro_batch_bytes(graph, schedule), strict=True)
        layers[OTHER_MICRO_BATCHES] = tuple(size for op, size in held if isinstance(op, Compute))
    layers["workspace"] = tuple(node.workspace_bytes for node in nodes)
    return Occupancy(nodes, starts_s(graph, schedule, places=places), layers)


Group = TypeVar("Group")


def live_bytes_by(
    graph: Graph, schedule: Schedule, group: Callable[[Stay], Group]
) -> dict[Group, tuple[int, ...]]:
    """Group -> bytes of its storages during each compute, for the storages made in the step.

    group: the group that a stay belongs to.
    """
    change: dict[Group, list[int]] = defaultdict(lambda: [0] * (len(schedule.ops) + 1))
    for stay in stays(graph, schedule):
        size_bytes = graph.tensor_by_name[stay.storage].size_bytes
        change[group(stay)][stay.start] += size_bytes
        change[group(stay)][stay.stop] -= size_bytes
    computes = [isinstance(op, Compute) for op in schedule.ops]
    return {key: tuple(compress(accumulate(row), computes)) for key, row in change.items()}
