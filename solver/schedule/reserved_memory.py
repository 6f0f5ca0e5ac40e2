"""What PyTorch's allocator takes from a card for a schedule: reserved beside allocated.

The storages of the schedule are played through `caching_allocator` in the order in which the
program allocates and frees them: first what is resident, then the step several times, as the first
one leaves another cache behind than it found. Gradients and outputs are given back when a step has
ended, as `zero_grad(set_to_none=True)` does. The optimizer's state is taken when it steps for the
first time, parameter by parameter, as PyTorch's optimizers do: between what that step left cached.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass

from graphs.graph import Graph
from solver.schedule.caching_allocator import (
    Block,
    CachingAllocator,
    DeviceFullError,
    ExpandableAllocator,
)
from solver.schedule.ops import Compute, Schedule
from solver.schedule.simulator import stays

N_STEPS = 6
"""On a device without end the second takes nothing new; a full one takes a few steps to settle."""
QUIET_STEPS = 2
NEAR = 1e-3
"""The least capacity is found to within this share of what is allocated."""
_STREAMS = {
    "fsdp.all_gather": 1,
    "fsdp.reduce_scatter": 2,
    "fsdp.all_reduce": 2,
    "fsdp.cast_gradients": 2,
}
"""Operators that run, and allocate, on another stream than the step: those of FSDP2
(`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`) that gather and that reduce. What is
copied out of a gathered buffer, and into one that is reduced, is on the stream of the step."""
ROUNDING = "allocator_rounding"
"""The resident tensor of a graph that stands for the rounding, which is played here."""


@dataclass(frozen=True)
class Reserved:
    """The most that is in use and that is taken from the device, in bytes.

    allocated_bytes: with every size rounded, as `torch.cuda.max_memory_allocated()` counts.
    reserved_bytes: `torch.cuda.max_memory_reserved()`.
    settled: the device has room for every step, and in the last QUIET_STEPS nothing had to be given
        back to it to make room.
    """

    allocated_bytes: int
    reserved_bytes: int
    settled: bool = True


def reserved(
    graph: Graph,
    schedule: Schedule,
    *,
    expandable: bool | None = None,
    capacity_bytes: float = math.inf,
    n_steps: int = N_STEPS,
) -> Reserved:
    """What the allocator takes for steps of a legal schedule.

    expandable: with `expandable_segments:True` (None: as the environment says).
    capacity_bytes: of the device.
    """
    if expandable is None:
        expandable = expandable_segments()
    kind = ExpandableAllocator if expandable else CachingAllocator
    allocator = kind(capacity_bytes=capacity_bytes)
    n_quiet = 0
    try:
        steps = Steps(graph, schedule)
        steps.start(allocator)
        for _ in range(n_steps):
            n_before = allocator.n_returns
            steps.play(allocator)
            n_quiet = n_quiet + 1 if allocator.n_returns == n_before else 0
    except DeviceFullError:
        n_quiet = 0
    settled = n_quiet >= min(n_steps, QUIET_STEPS)
    return Reserved(allocator.max_allocated_bytes, allocator.max_reserved_bytes, settled)


def least_capacity_bytes(graph: Graph, schedule: Schedule) -> int:
    """Of a device on which the steps settle, by bisection (a larger one may be worse: not proven).

    With the allocator's setting of this environment.
    """
    most = reserved(graph, schedule)
    below_bytes, enough_bytes = most.allocated_bytes - 1, most.reserved_bytes
    while enough_bytes - below_bytes > NEAR * most.allocated_bytes:
        middle_bytes = (below_bytes + enough_bytes) // 2
        if reserved(graph, schedule, capacity_bytes=middle_bytes).settled:
            enough_bytes = middle_bytes
        else:
            below_bytes = middle_bytes
    return enough_bytes


def rounding_bytes(graph: Graph) -> int:
    """What the graph counts for the rounding, as if all tensors were live at once."""
    tensor = graph.tensor_by_name.get(ROUNDING)
    return 0 if tensor is None else tensor.size_bytes


def reserved_by_setting(graph: Graph, schedule: Schedule) -> dict[str, int]:
    """Reserved bytes by the allocator's setting, for a graph of a CUDA device; {} for others.

    {} for a stage of a pipeline too: several micro-batches are not played.
    """
    if graph.n_in_flight > 1:
        return {}
    if not graph.meta.device_bytes and graph.meta.device != "cuda":
        return {}
    settings = {"default": False, "expandable_segments": True}
    return {
        name: reserved(graph, schedule, expandable=expandable).reserved_bytes
        for name, expandable in settings.items()
    }


def expandable_segments() -> bool:
    """Whether PYTORCH_ALLOC_CONF (or its former name) asks for them."""
    words = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in words.lower().replace(" ", "")


def state_blocks_bytes(graph: Graph, state_bytes: int) -> list[int]:
    """The optimizer's state as the blocks that it is taken in: for each trained parameter in turn
    as many as the state has times their bytes, rounded (Adam's two), in shares of its size. What is
    trained has a gradient, of its size.
    """
    made = (graph.tensor_by_name[name] for name in graph.outputs)
    gradients = [t for t in (*graph.resident, *made) if t.kind == "gradient" and t.size_bytes]
    sizes_bytes = [t.size_bytes for t in gradients]
    total_bytes = sum(sizes_bytes)
    n_blocks = max(1, round(state_bytes / max(total_bytes, 1)))
    blocks_bytes = [
        size_bytes * state_bytes // (total_bytes * n_blocks)
        for size_bytes in sizes_bytes
        for _ in range(n_blocks)
    ]
    left_bytes = state_bytes - sum(blocks_bytes)
    return [n for n in [*blocks_bytes, left_bytes] if n]


class Steps:
    """By position in the schedule: the storages given back before the op, and those it takes.

    A storage that is overwritten, and one whose bytes are none, is neither. A storage that is made
    anew while it is live is taken before its old bytes are given back. The first step played takes
    the optimizer's state too.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.size_bytes = {tensor.name: tensor.size_bytes for tensor in graph.tensors}
        self.n_ops = len(schedule.ops)
        nodes = [graph.node_by_name[op.node] for op in schedule.ops if isinstance(op, Compute)]
        self.stream = {
            name: _STREAMS[node.op]
            for node in nodes
            if node.op in _STREAMS
            for name in node.outputs
        }
        workspace = {
            node.name: (node.workspace_bytes, _STREAMS.get(node.op, 0))
            for node in nodes
            if node.workspace_bytes
        }
        self.workspace = {
            position: workspace[op.node]
            for position, op in enumerate(schedule.ops)
            if isinstance(op, Compute) and op.node in workspace
        }
        steps_at = [
            position
            for position, op in enumerate(schedule.ops)
            if isinstance(op, Compute) and graph.node_by_name[op.node].phase == "optimizer"
        ]
        resident = [t for t in graph.resident if t.alias_of is None and t.name != ROUNDING]
        states = [t.size_bytes for t in resident if t.kind == "optimizer_state" and steps_at]
        others = [t for t in resident if t.kind != "optimizer_state"] if states else resident
        self.resident = [tensor.size_bytes for tensor in others]
        self.first_taken = {steps_at[0]: state_blocks_bytes(graph, sum(states))} if states else {}
        order = {tensor.name: index for index, tensor in enumerate(graph.tensors)}
        starts: dict[int, set[str]] = defaultdict(set)
        stops: dict[int, set[str]] = defaultdict(set)
        for stay in stays(graph, schedule):
            if self.size_bytes[stay.storage]:
                starts[stay.start].add(stay.storage)
                stops[stay.stop].add(stay.storage)
        self.taken = {p: sorted(starts[p] - stops[p], key=order.__getitem__) for p in [*starts]}
        self.given = {p: sorted(stops[p] - starts[p], key=order.__getitem__) for p in [*stops]}

    def start(self, allocator: CachingAllocator) -> None:
        """What is resident before the first step."""
        for size_bytes in filter(None, self.resident):
            allocator.allocate(size_bytes)

    def play(self, allocator: CachingAllocator) -> None:
        """One step."""
        held: dict[str, list[Block]] = defaultdict(list)  # the older first
        for position in range(self.n_ops + 1):
            for name in self.given.get(position, ()):
                allocator.free(held[name].pop(0))
            for name in self.taken.get(position, ()):
                stream = self.stream.get(name, 0)
                held[name].append(allocator.allocate(self.size_bytes[name], stream=stream))
            for size_bytes in self.first_taken.pop(position, ()):  # kept for good
                allocator.allocate(size_bytes)
            if position in self.workspace:
                size_bytes, stream = self.workspace[position]
                allocator.free(allocator.allocate(size_bytes, stream=stream))
