"""Optimal schedules of tiny graphs with several micro-batches or passes in flight, by brute force.

The others in flight hold what the schedule itself saves, which is known only at the end of its
forward pass. So each possible number of saved bytes is tried, by a Dijkstra over the states of
`tests.support.brute_force`: the forward pass must end with at most these bytes, and before the
optimizer's first op the budget is smaller by these bytes for each of the others. After the forward
pass, one of the others may be replaced by the gradients that this pass has not made yet.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

from graphs.graph import Graph
from tests.support.brute_force import Optimum, States, ops_to


def fastest_in_flight(graph: Graph, *, budget_bytes: int) -> Optimum:
    """The least time over all legal schedules whose peak is within the budget."""
    room_bytes = budget_bytes - graph.resident_bytes
    most_bytes = max(room_bytes // graph.n_in_flight, min(room_bytes, graph.others_bytes))
    made_bytes = sum(
        graph.tensor_by_name[name].size_bytes
        for node in graph.forward_nodes
        for name in node.outputs
        if graph.tensor_by_name[name].alias_of is None
    )
    # every possible number of saved bytes: at most what fits, and what forward makes
    savings = range(min(most_bytes, max(made_bytes, graph.others_bytes)) + 1)
    found = [_fastest(graph, budget_bytes, saved_bytes) for saved_bytes in savings]
    return min(found, key=lambda truth: truth.time_s, default=Optimum(math.inf, None))


def _fastest(graph: Graph, budget_bytes: int, most_saved_bytes: int) -> Optimum:
    """The fastest schedule that saves at most these bytes, if each of the others holds as much."""
    each_bytes = max(most_saved_bytes, graph.others_bytes)
    others_bytes = (graph.n_in_flight - 1) * each_bytes
    return fastest_beside(graph, budget_bytes, most_saved_bytes, others_bytes)


def fastest_beside(
    graph: Graph, budget_bytes: int, most_saved_bytes: int, others_bytes: int
) -> Optimum:
    """The fastest schedule that saves at most `most_saved_bytes`, if the others in flight hold
    `others_bytes` together.

    A state is one of `States`, and whether anything was computed after the forward pass.
    """
    states, n_forward = States(graph), len(graph.forward_nodes)
    each_bytes = max(most_saved_bytes, graph.others_bytes)
    phases = [node.phase for node in graph.nodes]
    best: dict[Any, float] = {(states.start, False): 0.0}
    came: dict[Any, Any] = {}
    queue = [(0.0, (states.start, False))]
    while queue:
        time_s, here = heapq.heappop(queue)
        (done, live), has_turned = state, _ = here
        if time_s > best[here]:
            continue
        saves_too_much = states.live_bytes(live) - states.resident_bytes > most_saved_bytes
        if states.is_end(state) and (has_turned or not saves_too_much):
            return Optimum(time_s, ops_to(came, here))
        for op, after, peak_bytes, cost_s in states.moves(state):
            turned = has_turned
            if op[0] == "compute":
                turned = done >= n_forward
                if turned and not has_turned and saves_too_much:
                    continue
                steps = "optimizer" in phases[: after[0]]
                awaited_bytes = _awaited_bytes(graph, done)
                if (
                    after[0] > done and not graph.in_turn
                ):  # this node makes the gradients that are no longer awaited
                    awaited_bytes += awaited_bytes - _awaited_bytes(graph, after[0])
                awaited_bytes += graph.others_bytes if graph.in_turn else 0
                late_bytes = max(0, awaited_bytes - each_bytes) if turned else 0
                if peak_bytes + (0 if steps else others_bytes + late_bytes) > budget_bytes:
                    continue
            total_s = time_s + cost_s
            if total_s < best.get((after, turned), math.inf):
                best[after, turned] = total_s
                came[after, turned] = (here, op)
                heapq.heappush(queue, (total_s, (after, turned)))
    return Optimum(math.inf, None)


def _awaited_bytes(graph: Graph, n_done: int) -> int:
    """Bytes of the accumulated gradients that nodes yet to run make or read, the optimizer's nodes
    not counted."""
    left = [node for node in graph.nodes[n_done:] if node.phase != "optimizer"]
    touched = {name for node in left for name in (*node.inputs, *node.outputs)}
    return sum(
        graph.tensor_by_name[name].size_bytes for name in touched.intersection(graph.accumulated)
    )
