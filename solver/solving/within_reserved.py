"""A budget for what PyTorch's allocator takes from the card, instead of what tensors hold.

A plan fits if its steps, played through a model of the allocator on a device of so many bytes
(`solver.schedule.reserved_memory`), settle: nothing runs out, and no memory must go back to the
device to make room. That is no sum over positions, as it depends on the order of sizes. So plans
are made for fewer and fewer bytes until one fits. Reserved is never less than allocated, so the
bound for the whole budget holds for all plans that fit; that none is faster than the one returned
is not proven.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from graphs.graph import Graph
from solver.schedule import Obstacle, Request, Solution, Status, least_capacity_bytes, reserved

MAX_ROUNDS = 6
"""Plans that are made: each is for fewer bytes by what the last one needed too much."""


def planned_within_reserved(found: Solution, again: Callable[[Request], Solution]) -> Solution:
    """The first of the plans that fits; none, if the last one does not.

    found: for the whole budget. again: a plan for another request.
    The reserve of the answer's request includes what was left free for the allocator.
    """
    request, tried = found.request, found
    for n_left in reversed(range(MAX_ROUNDS)):
        if tried.schedule is None or tried.simulation is None:
            break
        if _fits(tried, request.available_bytes):
            return dataclasses.replace(tried, lower_bound_s=found.lower_bound_s).with_bound(0.0)
        over_bytes = least_capacity_bytes(tried.graph, tried.schedule) - request.available_bytes
        available_bytes = tried.simulation.peak_bytes - max(1, over_bytes)
        if not n_left or available_bytes <= 0:
            break
        reserve_bytes = request.budget_bytes - available_bytes
        tried = again(dataclasses.replace(request, reserve_bytes=reserve_bytes))
    if found.schedule is None:
        return found
    status: Status = "time_limit" if tried.status == "time_limit" else "infeasible"
    return dataclasses.replace(found, schedule=None, simulation=None, status=status)


def with_reserved(obstacle: Obstacle, graph: Graph) -> Obstacle:
    """The least budget of reserved memory is what its schedule needs with the allocator."""
    if obstacle.schedule is None:
        return obstacle
    reached_bytes = least_capacity_bytes(graph, obstacle.schedule)
    return dataclasses.replace(obstacle, reached_bytes=reached_bytes)


def _fits(solution: Solution, capacity_bytes: int) -> bool:
    assert solution.schedule is not None
    return reserved(solution.graph, solution.schedule, capacity_bytes=capacity_bytes).settled
