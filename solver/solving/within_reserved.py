"""A budget for what PyTorch's allocator takes from the card, instead of what tensors hold.

A plan fits if its steps, played through a model of the allocator on a device of so many bytes
(`solver.schedule.reserved_memory`), settle: nothing runs out, and no memory must go back to the
device to make room. That is no sum over positions, as it depends on the order of sizes. So plans
are made for fewer and fewer bytes until one fits.

**The bound.** What is reserved is at least what tensors hold, each rounded to 512 bytes. A graph
counts the rounding of all tensors at once, which may be more than that of those that are live. So
the bound is taken for as many bytes more as the graph counts for the rounding: it holds for all
plans that fit. That none is faster than the one returned is not proven.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from graphs.graph import Graph
from solver.schedule import (
    Obstacle,
    Request,
    Solution,
    Status,
    least_capacity_bytes,
    reserved,
    rounding_bytes,
)

MAX_ROUNDS = 6
"""Plans that are made: each is for fewer bytes by what the last one needed too much."""


def planned_within_reserved(
    request: Request, graph: Graph, planned: Callable[[Request], Solution]
) -> Solution:
    """The first of the plans that fits; none, if the last one does not.

    graph: any variant of the step. planned: the plan for a request of what is allocated.
    """

    def for_bytes(available_bytes: int) -> Solution:
        asked = dataclasses.replace(request, budget_of="allocated")
        return planned(dataclasses.replace(asked, budget_bytes=available_bytes, reserve_bytes=0))

    first = for_bytes(request.available_bytes + rounding_bytes(graph))
    tried = first
    for n_left in reversed(range(MAX_ROUNDS)):
        if tried.schedule is None or tried.simulation is None:
            break
        # by the simulator, and by the allocator
        if (
            tried.simulation.peak_bytes <= request.available_bytes
            and reserved(
                tried.graph, tried.schedule, capacity_bytes=request.available_bytes
            ).settled
        ):
            answer = dataclasses.replace(tried, request=request, lower_bound_s=first.lower_bound_s)
            return answer.with_bound(0.0)
        over_bytes = least_capacity_bytes(tried.graph, tried.schedule) - request.available_bytes
        less_bytes = min(request.available_bytes, tried.simulation.peak_bytes - max(1, over_bytes))
        if not n_left or less_bytes <= 0:
            break
        tried = for_bytes(less_bytes)
    status: Status = "time_limit" if tried.status == "time_limit" else "infeasible"
    return dataclasses.replace(
        first, request=request, schedule=None, simulation=None, status=status
    )


def with_reserved(obstacle: Obstacle, graph: Graph) -> Obstacle:
    """The least budget of reserved memory is what its schedule needs with the allocator."""
    proven_bytes = max(0, obstacle.proven_bytes - rounding_bytes(graph))
    obstacle = dataclasses.replace(obstacle, proven_bytes=proven_bytes)
    if obstacle.schedule is None:
        return obstacle
    needed_bytes = least_capacity_bytes(graph, obstacle.schedule)
    return dataclasses.replace(obstacle, reached_bytes=max(needed_bytes, obstacle.reached_bytes))
