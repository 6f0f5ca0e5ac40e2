"""Refine the fastest plan, once all variants of a step are planned.

Refining each variant right after its planning would take time from later variants, which may be
faster. Refining all of them afterwards would help little, since the fastest plan usually belongs to
the variant with the most room. So the fastest plan is carried over to every variant. Of the
variants in which it fits and is no slower, the last one, which rewrites the most, is refined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from graphs.graph import Graph
from solver.methods import Proposal, transfer_schedule
from solver.schedule import IllegalScheduleError, Request, Schedule, Solution, simulate
from solver.sizes_deadlines_progress import Deadline, now_s
from solver.solving.answers import fastest, solution_from_proposal, time_s


def with_fastest_refined(
    answers: Sequence[Solution],
    request: Request,
    *,
    refine: Callable[..., Proposal],
    plain: Graph,
    deadline: Deadline,
) -> list[Solution]:
    """Return the answers, one of them perhaps with a faster schedule.

    answers: the solutions of the variants, in the order of planning.
    refine: see `solver.methods.Method`.
    plain: the step without rewrites.
    deadline: when the work has to end.
    """
    best_so_far = fastest(answers)
    if best_so_far.schedule is None or deadline.passed:
        return [*answers]
    most_s = time_s(best_so_far)
    answers = [
        _with_schedule_if_fitting(best_so_far.schedule, each, most_s=most_s) for each in answers
    ]
    to_refine = min(reversed(answers), key=time_s)  # of equally fast ones the last
    started_s = now_s()
    proposal = refine(
        to_refine.graph,
        budget_bytes=request.available_bytes,
        time_limit_s=deadline.left_s,
        start=to_refine.schedule,
        proven_s=to_refine.lower_bound_s,
    )
    found = solution_from_proposal(
        to_refine.graph, request, proposal, plain=plain, started_s=started_s
    )
    refined = dataclasses.replace(
        fastest([to_refine, found]), timed_out=to_refine.timed_out or found.timed_out
    ).with_bound(to_refine.lower_bound_s)
    return [refined if answer is to_refine else answer for answer in answers]


def _with_schedule_if_fitting(schedule: Schedule, answer: Solution, *, most_s: float) -> Solution:
    """The answer with another variant's schedule, if that is legal here, fits, and takes at most
    `most_s` seconds; else the answer unchanged.
    """
    if schedule is answer.schedule:
        return answer
    moved = transfer_schedule(answer.graph, schedule)
    try:
        simulation = simulate(answer.graph, moved)
    except IllegalScheduleError:
        return answer
    if answer.request.excess(simulation) or simulation.time_s > most_s:
        return answer
    found = dataclasses.replace(answer, schedule=moved, simulation=simulation, status="feasible")
    return found.with_bound(answer.lower_bound_s)
