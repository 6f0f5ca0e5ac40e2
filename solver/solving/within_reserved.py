"""Plan within a budget of reserved memory: what PyTorch's allocator takes from the card.

A plan fits if its steps settle when they are played through a model of the allocator on a device
with that many bytes (`solver.schedule.reserved_memory`): no request fails, and no memory has to be
returned to the device to make room. This depends on the order of the allocations, so it is no sum
of bytes that a method could plan with. Instead, plans are made for smaller and smaller budgets of
allocated memory until one fits.

**The bound.** Reserved memory is at least the bytes of the live tensors, each rounded up to 512
bytes. A graph counts the rounding of all its tensors at once, which may be more than that of the
live ones. So the bound is proven for a budget larger by the rounding that the graph counts; then it
holds for all plans that fit. It is not proven that no faster plan than the returned one fits.
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
"""How many plans are made at most. Each budget is smaller by what the plan before took too much."""


def plan_within_reserved(
    request: Request, graph: Graph, plan_allocated: Callable[[Request], Solution]
) -> Solution:
    """Return the first plan that fits the reserved memory; without a schedule if none does.

    request: the request, for a budget of reserved memory.
    graph: any variant of the step.
    plan_allocated: plans a request for a budget of allocated memory.
    """

    def plan_for(available_bytes: int) -> Solution:
        return plan_allocated(
            dataclasses.replace(
                request, budget_of="allocated", budget_bytes=available_bytes, reserve_bytes=0
            )
        )

    first = plan_for(request.available_bytes + rounding_bytes(graph))
    candidate = first
    for n_left in reversed(range(MAX_ROUNDS)):
        if candidate.schedule is None or candidate.simulation is None:
            break
        # by the simulator, and by the allocator
        if (
            candidate.simulation.peak_bytes <= request.available_bytes
            and reserved(
                candidate.graph, candidate.schedule, capacity_bytes=request.available_bytes
            ).settled
        ):
            answer = dataclasses.replace(
                candidate, request=request, lower_bound_s=first.lower_bound_s
            )
            return answer.with_bound(0.0)
        excess_bytes = (
            least_capacity_bytes(candidate.graph, candidate.schedule) - request.available_bytes
        )
        smaller_bytes = min(
            request.available_bytes, candidate.simulation.peak_bytes - max(1, excess_bytes)
        )
        if not n_left or smaller_bytes <= 0:
            break
        candidate = plan_for(smaller_bytes)
    status: Status = "time_limit" if candidate.status == "time_limit" else "infeasible"
    return dataclasses.replace(
        first, request=request, schedule=None, simulation=None, status=status
    )


def with_reserved(obstacle: Obstacle, graph: Graph) -> Obstacle:
    """The obstacle for a budget of reserved memory: the least budget becomes what the schedule of
    the obstacle needs with the allocator."""
    proven_bytes = max(0, obstacle.proven_bytes - rounding_bytes(graph))
    obstacle = dataclasses.replace(obstacle, proven_bytes=proven_bytes)
    if obstacle.schedule is None:
        return obstacle
    needed_bytes = least_capacity_bytes(graph, obstacle.schedule)
    return dataclasses.replace(obstacle, reached_bytes=max(needed_bytes, obstacle.reached_bytes))
