"""Optimal schedules of tiny graphs by brute force: Dijkstra over all states of the device.

A state is how many nodes have run and which tensors are live. The moves from it are those that the
rules of the simulator allow: free a tensor that a node made, run the next node for the first time,
or recompute a forward node. This shares no code with the solver; the tests also simulate the
schedules that it finds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphs.graph import Graph
from solver.schedule.ops import WORDS, Schedule

Ops = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Optimum:
    """time_s: time of the fastest schedule within the budget (inf: none fits). ops: one such
    schedule."""

    time_s: float
    ops: Ops | None

    def schedule(self, graph: Graph) -> Schedule:
        """Only to be called if a schedule fits."""
        return Schedule(tuple(WORDS[word](name) for word, name in self.ops), graph.graph_id)


def fastest(graph: Graph, *, budget_bytes: int) -> Optimum:
    """The least time over all legal schedules whose peak is within the budget."""
    states = States(graph)
    best = {states.start: 0.0}
    came: dict[tuple[int, int], tuple[tuple[int, int], tuple[str, str]]] = {}
    queue = [(0.0, states.start)]
    while queue:
        time_s, state = heapq.heappop(queue)
        if time_s > best[state]:
            continue
        if states.is_end(state):
            return Optimum(time_s, ops_to(came, state))
        for op, after, peak_bytes, cost_s in states.moves(state):
            total_s = time_s + cost_s
            if peak_bytes <= budget_bytes and total_s < best.get(after, math.inf):
                best[after] = total_s
                came[after] = (state, op)
                heapq.heappush(queue, (total_s, after))
    return Optimum(math.inf, None)


def least_peak_bytes(graph: Graph) -> int:
    """The least peak of any legal schedule, by Dijkstra on the peak so far."""
    states = States(graph)
    first = graph.resident_bytes
    best = {states.start: first}
    queue = [(first, states.start)]
    while queue:
        peak, state = heapq.heappop(queue)
        if peak > best[state]:
            continue
        if states.is_end(state):
            return peak
        for _, after, peak_bytes, _ in states.moves(state):
            worst = max(peak, peak_bytes)
            if worst < best.get(after, 1 << 62):
                best[after] = worst
                heapq.heappush(queue, (worst, after))
    raise AssertionError("a graph can always run with unbounded memory")


def ops_to(came: Mapping[Any, tuple[Any, tuple[str, str]]], state: Any) -> Ops:
    """The ops on the way to a state. came: state -> the state before it, and the op."""
    ops = []
    while state in came:
        state, op = came[state]
        ops.append(op)
    return tuple(reversed(ops))


class States:
    """The states of a graph, (number of first runs done, bit mask of live tensors that nodes made),
    and the moves between them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = [tensor.name for tensor in graph.tensors if tensor.name in graph.producer]
        self.bit = {name: 1 << i for i, name in enumerate(self.made)}
        resident = {tensor.name for tensor in graph.tensors} - set(self.made)
        self.resident_bytes = sum(
            t.size_bytes for t in graph.tensors if t.name in resident and t.alias_of is None
        )
        self.storage: dict[str, int] = {}
        for tensor in graph.tensors:
            root = tensor.alias_of or tensor.name
            if tensor.name in self.bit and root in self.bit:
                self.storage[root] = self.storage.get(root, 0) | self.bit[tensor.name]
        size = {tensor.name: tensor.size_bytes for tensor in graph.tensors}
        self.storages = [(mask, size[root]) for root, mask in self.storage.items()]
        self.size = size
        self.inputs = [self._mask(node.inputs) for node in graph.nodes]
        self.outputs = [self._mask(node.outputs) for node in graph.nodes]
        # by node, the storages made by other nodes of which it makes an alias, as masks of tensors
        self.needs = [
            [
                self.storage[root]
                for root in {graph.tensor_by_name[name].alias_of for name in node.outputs}
                if root in self.storage and root not in node.outputs
            ]
            for node in graph.nodes
        ]
        self.goal = self._mask(graph.outputs)
        self.start = (0, 0)

    def _mask(self, names: tuple[str, ...]) -> int:
        mask = 0
        for name in names:
            mask |= self.bit.get(name, 0)
        return mask

    def is_end(self, state: tuple[int, int]) -> bool:
        return state[0] == len(self.graph.nodes) and self.goal & ~state[1] == 0

    def live_bytes(self, live: int) -> int:
        return self.resident_bytes + sum(size for mask, size in self.storages if live & mask)

    def moves(
        self, state: tuple[int, int]
    ) -> Iterator[tuple[tuple[str, str], tuple[int, int], int, float]]:
        """Yield (op, next state, bytes on the device during the op, seconds)."""
        done, live = state
        now_bytes = self.live_bytes(live)
        for name in self.made:
            if live & self.bit[name]:
                # freeing never makes a new peak, so its bytes are given as 0
                yield ("free", name), (done, live & ~self.bit[name]), 0, 0.0
        for position, node in enumerate(self.graph.nodes[: done + 1]):
            again = position < done
            if again and not (node.phase == "forward" and node.recomputable):
                continue
            if self.inputs[position] & ~live or any(m & live == 0 for m in self.needs[position]):
                continue
            if again and not self._may_repeat(position, live):
                continue
            peak_bytes = now_bytes + node.workspace_bytes
            for name in node.outputs:
                tensor = self.graph.tensor_by_name[name]
                if tensor.alias_of is None:
                    peak_bytes += tensor.size_bytes
            after = (done if again else done + 1, live | self.outputs[position])
            yield ("compute", node.name), after, peak_bytes, node.time_s

    def _may_repeat(self, position: int, live: int) -> bool:
        """Whether a node may be recomputed: some output is not live, and no alias holds an old
        storage of its outputs."""
        if self.outputs[position] & ~live == 0:
            return False
        for name in self.graph.nodes[position].outputs:
            holders = self.storage.get(name, 0) & live
            if holders and (not holders & self.bit[name] or holders & ~self.outputs[position]):
                return False
        return True
