"""The plans of a step's variants, refined, once all are planned and a gap is left.

Not each variant in its turn: that would take the time that later ones need, which may be faster.
Each begins from its own plan and from the fastest of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from graphs.graph import Graph
from solver.methods import Proposal, transferred
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import Deadline, now_s
from solver.solving.answers import fastest, judged, time_s


def with_plans_refined(
    answers: Sequence[Solution],
    request: Request,
    *,
    refine: Callable[..., Proposal],
    plain: Graph,
    deadline: Deadline,
) -> list[Solution]:
    """The answers, some perhaps with a faster schedule.

    refine: as of `solver.methods.Method`.
    """
    answers = list(answers)
    for index, known in enumerate(answers):
        so_far = fastest(answers)
        if known.schedule is None or so_far.schedule is None or deadline.passed:
            continue
        if known.lower_bound_s >= time_s(so_far):
            continue
        started_s = now_s()
        proposal = refine(
            known.graph,
            budget_bytes=request.available_bytes,
            time_limit_s=deadline.left_s / (len(answers) - index),
            starts=[known.schedule, transferred(known.graph, so_far.schedule)],
            proven_s=known.lower_bound_s,
        )
        found = judged(known.graph, request, proposal, plain=plain, started_s=started_s)
        answers[index] = dataclasses.replace(
            fastest([known, found]), timed_out=known.timed_out or found.timed_out
        ).with_bound(known.lower_bound_s)
    return answers
