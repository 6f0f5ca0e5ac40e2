"""Write a plan's predicted memory as a snapshot that https://pytorch.org/memory_viz opens.

The file is a pickled dictionary with the fields of `torch.cuda.memory._snapshot()`, which PyTorch
documents there, so that a prediction and a recording of the same step can be viewed side by side.
It is written without torch. The viewer has its own unpickler, which supports protocols 2 to 4 and
dictionaries, lists, tuples, strings and numbers.

Allocations and frees are in the order of the schedule, with the sizes that the simulator counts:
the most bytes allocated at once are the predicted peak. The addresses are made up, in one segment
by first fit; `solver.schedule.reserved` predicts what the caching allocator takes from a card.
"""

from __future__ import annotations

import itertools
import pickle
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs.files import write_whole
from graphs.graph import Graph
from solver.schedule import (
    OTHER_MICRO_BATCHES,
    Compute,
    Schedule,
    Solution,
    Stay,
    baseline,
    name_in,
    other_micro_batch_bytes,
    simulate,
    stays,
    word_for,
)

PROTOCOL = 4
FIRST_ADDRESS = 1 << 40
"""Looks like an address of a card; any other would do."""
POOL = (0, 0)


@dataclass(frozen=True)
class Allocation:
    """Bytes on the device during the ops at positions start .. stop - 1.

    start: -1: before the first op.
    stop: None: not freed until the end.
    frames: the stack shown in the viewer, (file, line, function), the innermost frame first.
    """

    size_bytes: int
    start: int
    stop: int | None
    frames: tuple[tuple[str, int, str], ...]


def write_snapshot(solution: Solution, path: str | Path, *, without_plan: bool = False) -> None:
    """Write the snapshot atomically.

    without_plan: write the baseline, to compare with a recording of a step without a plan.

    Raises ValueError for a Solution without a schedule, unless `without_plan` is set.
    """
    value = snapshot(solution, without_plan=without_plan)
    write_whole(Path(path), pickle.dumps(value, protocol=PROTOCOL))


def snapshot(solution: Solution, *, without_plan: bool = False) -> dict[str, Any]:
    """The snapshot: `segments` at the end of the step, and `device_traces` over the whole step."""
    graph, schedule = solution.graph, solution.schedule
    if without_plan:
        graph, schedule = solution.unplanned, baseline(solution.unplanned)
    if schedule is None:
        raise ValueError(
            f"no schedule to write: the status is {solution.status}{solution.obstacle_text}"
        )
    allocations = [a for a in _allocations(graph, schedule) if a.size_bytes]
    starts, stops = defaultdict(list), defaultdict(list)
    for allocation in allocations:
        starts[allocation.start].append(allocation)
        if allocation.stop is not None:
            stops[allocation.stop].append(allocation)
    arena = _Arena()
    entries: list[dict[str, Any]] = []
    placed: dict[int, int] = {}  # id of an allocation -> its address
    for position in range(-1, len(schedule.ops) + 1):
        for allocation in stops[position]:
            address = placed.pop(id(allocation))
            arena.free(address, allocation.size_bytes)
            for action in ("free_requested", "free_completed"):
                entries.append(_trace_entry(action, address, allocation))
        for allocation in starts[position]:
            placed[id(allocation)] = address = arena.allocate(allocation.size_bytes)
            entries.append(_trace_entry("alloc", address, allocation))
    at_the_end = {placed[id(a)]: a for a in allocations if id(a) in placed}
    whole = Allocation(arena.size_bytes, -1, None, ())
    entries.insert(0, _trace_entry("segment_alloc", FIRST_ADDRESS, whole))
    return {"segments": [_segment(arena.size_bytes, at_the_end)], "device_traces": [entries]}


def _allocations(graph: Graph, schedule: Schedule) -> Iterator[Allocation]:
    """All allocations: resident tensors, storages made by ops, what other micro-batches in flight
    hold, and workspaces."""
    paths = {tensor: path for path, tensor in graph.meta.parameters.items()}
    paths |= {tensor: path for path, tensor in graph.meta.buffers.items()}
    for tensor in graph.resident:
        if tensor.alias_of is None:
            resident = (
                (tensor.kind, 0, paths.get(tensor.name, tensor.name)),
                ("before the step", 0, "resident"),
            )
            yield Allocation(tensor.size_bytes, -1, None, resident)
    for stay in _merged_stays(graph, schedule):
        stop = stay.stop if stay.stop < len(schedule.ops) else None
        frames = _frames(graph, schedule, stay.start, stay.storage)
        yield Allocation(graph.tensor_by_name[stay.storage].size_bytes, stay.start, stop, frames)
    if graph.n_in_flight > 1 and schedule.ops:
        saved_bytes = simulate(graph, schedule).saved_bytes
        # what the others hold is one allocation for as long as its size stays the same
        by_op = enumerate(other_micro_batch_bytes(graph, schedule, saved_bytes))
        for size_bytes, ops in itertools.groupby(by_op, key=lambda each: each[1]):
            positions = [position for position, _ in ops]
            stop = positions[-1] + 1
            if size_bytes:
                end = stop if stop < len(schedule.ops) else None
                yield Allocation(size_bytes, positions[0], end, (("step", 0, OTHER_MICRO_BATCHES),))
    for position, op in enumerate(schedule.ops):
        if isinstance(op, Compute):
            frames = _frames(graph, schedule, position, "workspace")
            workspace_bytes = graph.node_by_name[op.node].workspace_bytes
            yield Allocation(workspace_bytes, position, position + 1, frames)


def _merged_stays(graph: Graph, schedule: Schedule) -> list[Stay]:
    """The stays of storages, merged where an op overwrites a storage: `stays` begins a new stay
    there, but the memory is the same."""
    found: list[Stay] = []
    last: dict[str, int] = {}  # storage -> index of its last stay
    for stay in sorted(stays(graph, schedule), key=lambda stay: (stay.start, stay.stop)):
        index = last.get(stay.storage)
        if index is not None and found[index].stop == stay.start:
            before = found[index]
            found[index] = Stay(stay.storage, before.layer, before.start, stay.stop)
        else:
            last[stay.storage] = len(found)
            found.append(stay)
    return found


def _frames(
    graph: Graph, schedule: Schedule, position: int, what: str
) -> tuple[tuple[str, int, str], ...]:
    """The stack for an op. The viewer shows (file, line, function) for each frame: here (operator,
    position in the schedule, what is allocated) and below it (module, position, what the op does).
    """
    op = schedule.ops[position]
    node = graph.node_by_name[op.node] if isinstance(op, Compute) else graph.producer[name_in(op)]
    action = node.phase if isinstance(op, Compute) else word_for(op)
    return ((node.op, position, what), (node.module or "step", position, f"{action} {node.name}"))


def _trace_entry(action: str, address: int, of: Allocation) -> dict[str, Any]:
    """One entry of a device trace."""
    return {
        "action": action,
        "addr": address,
        "frames": _frames_json(of),
        "size": of.size_bytes,
        "stream": 0,
        "pool_id": POOL,
    }


def _frames_json(of: Allocation) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in of.frames]


def _segment(total_bytes: int, live: dict[int, Allocation]) -> dict[str, Any]:
    """The only segment; its blocks cover it without gaps. live: address -> allocation."""
    blocks: list[dict[str, Any]] = []
    block_start = FIRST_ADDRESS
    for address, allocation in sorted(live.items()):
        block = {
            "size": allocation.size_bytes,
            "requested_size": allocation.size_bytes,
            "address": address,
            "state": "active_allocated",
            "frames": _frames_json(allocation),
        }
        blocks += [*_free_block(block_start, address), block]
        block_start = address + allocation.size_bytes
    blocks += _free_block(block_start, FIRST_ADDRESS + total_bytes)
    live_bytes = sum(allocation.size_bytes for allocation in live.values())
    return {
        "device": 0,
        "address": FIRST_ADDRESS,
        "total_size": total_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": POOL,
        "allocated_size": live_bytes,
        "active_size": live_bytes,
        "blocks": blocks,
    }


def _free_block(start: int, stop: int) -> list[dict[str, Any]]:
    """A free block between two addresses, in a list; empty if they are equal."""
    if start == stop:
        return []
    size = {"size": stop - start, "requested_size": 0}
    return [{**size, "address": start, "state": "inactive", "frames": []}]


class _Arena:
    """Assigns addresses by first fit. size_bytes: of the segment, which grows as needed."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._gaps: list[tuple[int, int]] = []  # (start, stop), ascending, not adjacent

    def allocate(self, size_bytes: int) -> int:
        """Take the first gap that is large enough, or extend the segment; return the address."""
        for index, (start, stop) in enumerate(self._gaps):
            if stop - start >= size_bytes:
                self._gaps[index : index + 1] = (
                    [(start + size_bytes, stop)] if stop - start > size_bytes else []
                )
                return start
        end = FIRST_ADDRESS + self.size_bytes
        start = self._gaps.pop()[0] if self._gaps and self._gaps[-1][1] == end else end
        self.size_bytes = start + size_bytes - FIRST_ADDRESS
        return start

    def free(self, start: int, size_bytes: int) -> None:
        """Free bytes at an address; joins adjacent gaps."""
        stop = start + size_bytes
        index = bisect_left(self._gaps, (start, stop))
        if index < len(self._gaps) and self._gaps[index][0] == stop:
            stop = self._gaps.pop(index)[1]
        if index and self._gaps[index - 1][1] == start:
            start = self._gaps.pop(index - 1)[0]
        insort(self._gaps, (start, stop))
