"""The fastest plan of a step's variants, refined, once all are planned and a gap is left.

Not each variant in its turn: that would take the time that later ones need, which may be faster.
And not the others afterwards: the fastest variant usually is the one with the most room, so their
plans would hardly become faster than its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from graphs.graph import Graph
from solver.methods import Proposal
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import Deadline, now_s
from solver.solving.answers import fastest, judged


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
    known = fastest(answers)
    if known.schedule is None or deadline.passed:
        return [*answers]
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
