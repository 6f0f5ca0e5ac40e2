"""Traces of allocations and frees, and their outcomes under the model of the allocator."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

from graphs.graph import Graph
from solver.methods import METHODS
from solver.schedule import Schedule, baseline, simulate
from solver.schedule.caching_allocator import (
    MIB,
    Block,
    CachingAllocator,
    DeviceFullError,
    ExpandableAllocator,
)
from solver.schedule.reserved_memory import Steps

Trace = list[list[int]]
"""A list of requests: [index, bytes, stream] allocates, [index] frees. An allocation's index is its
position in the trace; streams are multiples of 32."""

GPT2 = Path(__file__).parents[2] / "tests" / "data" / "gpt2_small_b8_t1024.json"
SHARES = (1.0, 0.8, 0.6)
FEW_SIZES = (8192, MIB, 3 * MIB, 12 * MIB + 5, 32 * MIB, 112 * MIB, 256 * MIB)
"""A few sizes: models, too, have many tensors of few sizes."""


def random_trace(rng: random.Random, n_ops: int, shape: str, n_streams: int) -> Trace:
    """Allocations and frees in random order.

    shape: "mixed" for sizes from 10 bytes to 300 MB, "few" for those in FEW_SIZES.
    """
    trace: Trace = []
    live: list[int] = []
    for index in range(n_ops):
        if live and rng.random() < 0.47:
            trace.append([live.pop(rng.randrange(len(live)))])
            continue
        size_bytes = int(10 ** rng.uniform(1, 8.5)) if shape == "mixed" else rng.choice(FEW_SIZES)
        trace.append([index, size_bytes, 32 * rng.randrange(n_streams)])
        live.append(index)
    return trace


def plan_traces() -> Iterator[Trace]:
    """Traces of two steps of GPT-2 under plans for SHARES of the peak without a plan."""
    graph = Graph.load(GPT2)
    plain = baseline(graph)
    peak_bytes = simulate(graph, plain).peak_bytes
    for share in SHARES:
        budget_bytes = int(share * peak_bytes)
        proposal = METHODS["auto"](graph, budget_bytes=budget_bytes, time_limit_s=600.0, seed=0)
        yield steps_trace(graph, proposal.schedule or plain, n_steps=2)


def steps_trace(graph: Graph, schedule: Schedule, *, n_steps: int) -> Trace:
    """The allocation of the resident tensors, then `n_steps` steps under the schedule."""
    recorder = _Recorder()
    steps = Steps(graph, schedule)
    steps.start(recorder)
    for _ in range(n_steps):
        steps.play(recorder)
    return recorder.trace


class _Recorder(CachingAllocator):
    """Records the requests that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.trace: Trace = []
        self._index: dict[int, int] = {}

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Block:
        block = super().allocate(size_bytes, stream=stream)
        self._index[id(block)] = len(self.trace)
        self.trace.append([len(self.trace), size_bytes, stream])
        return block

    def free(self, block: Block) -> None:
        self.trace.append([self._index[id(block)]])
        super().free(block)


def outcomes(trace: Trace, *, expandable: bool, capacity_bytes: int | None) -> list[list[int]]:
    """Play a trace through the model. After each request: allocated bytes, reserved bytes, how
    often free memory was returned to a full device so far, and 1 if the request failed (else 0)."""
    kind = ExpandableAllocator if expandable else CachingAllocator
    allocator = kind(capacity_bytes=capacity_bytes or math.inf)
    blocks: dict[int, Block] = {}
    results = []
    for index, *request in trace:
        failed = 0
        if request:
            size_bytes, stream = request
            try:
                blocks[index] = allocator.allocate(size_bytes, stream=stream)
            except DeviceFullError:
                failed = 1
        elif index in blocks:
            allocator.free(blocks.pop(index))
        counts = (allocator.allocated_bytes, allocator.reserved_bytes, allocator.n_returns)
        results.append([*counts, failed])
    return results
