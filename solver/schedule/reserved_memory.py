"""Reserved memory: what PyTorch's caching allocator takes from a card to run a schedule.

The allocations and frees of the schedule are played through `caching_allocator` in program order:
first the resident tensors, then several steps, since each step starts from the cache that the one
before left. Gradients and outputs are freed when a step has ended, as
`zero_grad(set_to_none=True)` does. The optimizer's state is allocated during the first optimizer
step, parameter by parameter, as PyTorch's optimizers do, so it may use blocks that this step left
in the cache.
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
"""How many steps are played. On an unlimited device the second step reserves nothing new; on a full
one it takes a few steps until the cache settles."""
QUIET_STEPS = 2
"""How many last steps must not have to return memory to the device (`Reserved.settled`)."""
CAPACITY_TOLERANCE = 1e-3
"""Tolerance of the search for the least capacity, as a share of the allocated bytes."""
_STREAMS = {
    "fsdp.all_gather": 1,
    "fsdp.reduce_scatter": 2,
    "fsdp.all_reduce": 2,
    "fsdp.cast_gradients": 2,
}
"""Operators that run, and allocate, on another stream than the rest of the step (0): the gathering
and reducing operators of FSDP2 (`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`). The
copies out of a gathered buffer and into a reduced one are on the stream of the step."""
ROUNDING = "allocator_rounding"
"""The resident tensor of a graph that stands for the allocator's rounding. It is left out here,
since the allocator model rounds by itself."""


@dataclass(frozen=True)
class Reserved:
    """The peaks of allocated and reserved memory over several steps.

    allocated_bytes: peak of `torch.cuda.max_memory_allocated()`, with every size rounded.
    reserved_bytes: peak of `torch.cuda.max_memory_reserved()`.
    settled: the device has room for every step, and in the last QUIET_STEPS no memory had to be
        returned to it to make room.
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
    """Simulate the allocator over several steps of a legal schedule.

    expandable: use `expandable_segments:True` (None: as the environment variable says).
    capacity_bytes: memory of the device (inf: unlimited).
    n_steps: how many steps are played.
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
    """The smallest device memory found, by bisection, with which the steps settle.

    Bisection assumes that more memory never hurts, which is not proven. The allocator's setting is
    that of this environment (`expandable_segments`).
    """
    unlimited = reserved(graph, schedule)
    below_bytes, enough_bytes = unlimited.allocated_bytes - 1, unlimited.reserved_bytes
    while enough_bytes - below_bytes > CAPACITY_TOLERANCE * unlimited.allocated_bytes:
        middle_bytes = (below_bytes + enough_bytes) // 2
        if reserved(graph, schedule, capacity_bytes=middle_bytes).settled:
            enough_bytes = middle_bytes
        else:
            below_bytes = middle_bytes
    return enough_bytes


def rounding_bytes(graph: Graph) -> int:
    """Bytes that the graph counts for the allocator's rounding, as if all tensors were live at
    once."""
    tensor = graph.tensor_by_name.get(ROUNDING)
    return 0 if tensor is None else tensor.size_bytes


def reserved_by_setting(graph: Graph, schedule: Schedule) -> dict[str, int]:
    """Allocator setting ("default", "expandable_segments") -> reserved bytes.

    {} for a graph of another device than CUDA, and for a step with several micro-batches in flight,
    which cannot be simulated here.
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
    """Whether PYTORCH_ALLOC_CONF, or its former name, turns on expandable segments."""
    words = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in words.lower().replace(" ", "")


def state_blocks_bytes(graph: Graph, state_bytes: int) -> list[int]:
    """The sizes of the blocks in which the optimizer's state is allocated.

    Each trained parameter in turn gets the same number of blocks: the ratio of the state's bytes to
    all parameters' bytes, rounded (2 for Adam), and 1 at least. The blocks' sizes are in proportion
    to the parameter's; what is left over is a last block. Gradients stand for the trained
    parameters: they have the same sizes.

    state_bytes: the whole optimizer state.
    """
    outputs = (graph.tensor_by_name[name] for name in graph.outputs)
    gradients = [t for t in (*graph.resident, *outputs) if t.kind == "gradient" and t.size_bytes]
    sizes_bytes = [t.size_bytes for t in gradients]
    total_bytes = sum(sizes_bytes)
    n_blocks = max(1, round(state_bytes / max(total_bytes, 1)))
    blocks_bytes = [
        size_bytes * state_bytes // (total_bytes * n_blocks)
        for size_bytes in sizes_bytes
        for _ in range(n_blocks)
    ]
    remainder_bytes = state_bytes - sum(blocks_bytes)
    return [n for n in [*blocks_bytes, remainder_bytes] if n]


class Steps:
    """The allocations and frees of a schedule by position, to be played step after step.

    freed_at, allocated_at: position -> the storages freed before that op, and those that it
        allocates.
    workspace: position -> (bytes, stream) of the op's workspace.
    stream: storage -> its stream, if that is not the stream of the step (0).
    resident: bytes of each resident storage that is allocated before the first step.
    optimizer_state_at: position of the optimizer's first op -> the blocks of its state, which only
        the first step played allocates.

    Overwriting a storage neither allocates nor frees it; storages of 0 bytes are left out. A
    storage that is recomputed while it is live is allocated again before its old bytes are freed.
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
        # The optimizer's state is not resident from the start if the step has an optimizer: its
        # first step allocates it.
        optimizer_positions = [
            position
            for position, op in enumerate(schedule.ops)
            if isinstance(op, Compute) and graph.node_by_name[op.node].phase == "optimizer"
        ]
        resident = [t for t in graph.resident if t.alias_of is None and t.name != ROUNDING]
        states = [
            t.size_bytes for t in resident if t.kind == "optimizer_state" and optimizer_positions
        ]
        others = [t for t in resident if t.kind != "optimizer_state"] if states else resident
        self.resident = [tensor.size_bytes for tensor in others]
        self.optimizer_state_at = (
            {optimizer_positions[0]: state_blocks_bytes(graph, sum(states))} if states else {}
        )
        # Two stays of a storage that meet are an overwrite, which allocates and frees nothing.
        order = {tensor.name: index for index, tensor in enumerate(graph.tensors)}
        starts: dict[int, set[str]] = defaultdict(set)
        stops: dict[int, set[str]] = defaultdict(set)
        for stay in stays(graph, schedule):
            if self.size_bytes[stay.storage]:
                starts[stay.start].add(stay.storage)
                stops[stay.stop].add(stay.storage)
        self.allocated_at = {
            p: sorted(starts[p] - stops[p], key=order.__getitem__) for p in [*starts]
        }
        self.freed_at = {p: sorted(stops[p] - starts[p], key=order.__getitem__) for p in [*stops]}

    def start(self, allocator: CachingAllocator) -> None:
        """Allocate the resident tensors, before the first step."""
        for size_bytes in filter(None, self.resident):
            allocator.allocate(size_bytes)

    def play(self, allocator: CachingAllocator) -> None:
        """Play the allocations and frees of one step."""
        held: dict[str, list[Block]] = defaultdict(list)  # storage -> its blocks, the oldest first
        for position in range(self.n_ops + 1):
            for name in self.freed_at.get(position, ()):
                allocator.free(held[name].pop(0))
            for name in self.allocated_at.get(position, ()):
                stream = self.stream.get(name, 0)
                held[name].append(allocator.allocate(self.size_bytes[name], stream=stream))
            for size_bytes in self.optimizer_state_at.pop(position, ()):  # never freed
                allocator.allocate(size_bytes)
            if position in self.workspace:
                size_bytes, stream = self.workspace[position]
                allocator.free(allocator.allocate(size_bytes, stream=stream))
