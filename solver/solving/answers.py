"""Simulate what a method proposes for each variant of a step, and pick the best Solution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from graphs.graph import Graph, warn
from solver.methods import Proposal
from solver.schedule import (
    IllegalScheduleError,
    Request,
    Schedule,
    Simulation,
    Solution,
    Status,
    copy_layout,
    simulate,
)


def solution_from_proposal(
    graph: Graph, request: Request, proposal: Proposal, *, baseline: Simulation
) -> Solution:
    """Simulate a method's proposal and return it as a Solution.

    An illegal schedule, or one above the budget, is dropped with a warning.

    graph: the variant of the step that the proposal is for.
    baseline: the step without a plan.
    """
    simulation = _simulate_if_valid(graph, request, proposal.schedule)
    bound_s = proposal.lower_bound_s
    status: Status = "feasible" if simulation is not None else "infeasible"
    if simulation is None and proposal.timed_out and not math.isinf(bound_s):
        status = "time_limit"
    return Solution(
        status=status,
        graph=graph,
        schedule=None if simulation is None else proposal.schedule,
        simulation=simulation,
        request=request,
        baseline=baseline,
        lower_bound_s=bound_s,
        method=request.method,
        solve_time_s=0.0,  # `attempt` sets it for all variants together
        timed_out=proposal.timed_out,
    ).with_bound(bound_s)


def _simulate_if_valid(
    graph: Graph, request: Request, schedule: Schedule | None
) -> Simulation | None:
    """Simulate the schedule; None, with a warning, if it is illegal or does not fit."""
    if schedule is None:
        return None
    try:
        simulation = simulate(graph, schedule, places=request.places)
    except IllegalScheduleError as error:
        reason = str(error)
    else:
        reason = request.excess(simulation)
        # gaps between the copies may take more than the sum of their bytes
        if not reason and schedule.has_copies:
            places = request.places and request.places.without_state(graph.host_state_bytes)
            reason = copy_layout(graph, schedule, places).excess(places)
        if not reason:
            return simulation
    warn(
        f"method {request.method} proposed an invalid schedule, which was ignored ({reason}); "
        "please report this as a bug"
    )
    return None


def time_s(answer: Solution) -> float:
    """Seconds of the planned step; inf without a schedule."""
    return math.inf if answer.simulation is None else answer.simulation.time_s


def excess_bytes(answer: Solution) -> int:
    """How far the plan's peak is above that of the step without a plan, at least 0.

    A plan can take more, because eager mode updates some tensors in place and the planned program
    may not.
    """
    if answer.simulation is None:
        return 0
    return max(0, answer.simulation.peak_bytes - answer.baseline.peak_bytes)


def fastest(answers: Sequence[Solution]) -> Solution:
    """The fastest solution; of equally fast ones, the one with the fewest `excess_bytes`, then the
    first."""
    return min(answers, key=lambda answer: (time_s(answer), excess_bytes(answer)))


def best(answers: Sequence[Solution]) -> Solution:
    """The fastest of the variants' solutions, with the bound that holds for all: the least one."""
    chosen = fastest(answers)
    bound_s = min(answer.lower_bound_s for answer in answers)
    late = chosen.simulation is None and any(s.status == "time_limit" for s in answers)
    return dataclasses.replace(
        chosen,
        lower_bound_s=bound_s,
        status="time_limit" if late else chosen.status,
        timed_out=any(answer.timed_out for answer in answers),
    ).with_bound(bound_s)
