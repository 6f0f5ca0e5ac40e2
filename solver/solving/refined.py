"""The fastest plan of a step's variants, refined, once all are planned and a gap is left.

Not each variant in its turn: that would take the time that later ones need, which may be faster.
And not the others afterwards: the fastest plan usually is one of the variant with the most room, so
those of others would hardly become faster. So the fastest plan is first carried over to each
variant; of those in which it fits and is no slower, the last, which rewrites the most, is refined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from graphs.graph import Graph
from solver.methods import Proposal, transferred
from solver.schedule import IllegalScheduleError, Request, Schedule, Solution, simulate
from solver.sizes_deadlines_progress import Deadline, now_s
from solver.solving.answers import fastest, judged, time_s


def with_fastest_refined(
    answers: Sequence[Solution],
    request: Request,
    *,
    refine: Callable[..., Proposal],
    plain: Graph,
    deadline: Deadline,
) -> list[Solution]:
    """The answers, the fastest perhaps with a faster schedule.

    refine: as of `solver.methods.Method`.
    """
    so_far = fastest(answers)
    if so_far.schedule is None or deadline.passed:
        return [*answers]
    most_s = time_s(so_far)
    answers = [_carried_over(so_far.schedule, each, most_s=most_s) for each in answers]
    known = min(reversed(answers), key=time_s)
    started_s = now_s()
    proposal = refine(
        known.graph,
        budget_bytes=request.available_bytes,
        time_limit_s=deadline.left_s,
        start=known.schedule,
        proven_s=known.lower_bound_s,
    )
    found = judged(known.graph, request, proposal, plain=plain, started_s=started_s)
    refined = dataclasses.replace(
        fastest([known, found]), timed_out=known.timed_out or found.timed_out
    ).with_bound(known.lower_bound_s)
    return [refined if answer is known else answer for answer in answers]


def _carried_over(schedule: Schedule, answer: Solution, *, most_s: float) -> Solution:
    """The answer with this schedule of another variant, if that is legal here, fits, and takes no
    longer than this.
    """
    if schedule is answer.schedule:
        return answer
    moved = transferred(answer.graph, schedule)
    try:
        simulation = simulate(answer.graph, moved)
    except IllegalScheduleError:
        return answer
    if answer.request.excess(simulation) or simulation.time_s > most_s:
        return answer
    found = dataclasses.replace(answer, schedule=moved, simulation=simulation, status="feasible")
    return found.with_bound(answer.lower_bound_s)
