"""What the bytes at one moment of a schedule are: the memory breakdown of the report.

The judge says how many bytes are on the device; here they are told apart by `Tensor.kind`, with
the judge's own rules, so that the parts add up to its figure.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphs.graph import Graph, Node
from solver.schedule import Compute, Schedule
from solver.simulate import Trace

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


def node_at(graph: Graph, schedule: Schedule, trace: Trace) -> Node | None:
    """The node during which the peak stands (None: only what is resident counts)."""
    if trace.peak_op is None:
        return None
    op = schedule.ops[trace.peak_op]
    return graph.node_by_name[op.node] if isinstance(op, Compute) else graph.producer[op.tensor]
