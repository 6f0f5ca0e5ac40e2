"""The fastest plan of a step, refined, once its variants are planned and a gap is left.

Not each variant in its turn: that would take the time that later ones need, which may be faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from graphs.graph import Graph
from solver.methods import Proposal
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import Deadline, now_s
from solver.solving.answers import best, fastest, judged


def with_fastest_refined(
    answers: Sequence[Solution],
    request: Request,
    *,
    refine: Callable[..., Proposal],
    plain: Graph,
    deadline: Deadline,
) -> list[Solution]:
    """The answers, the fastest of them perhaps with a faster schedule.

    refine: as of `solver.methods.Method`.
    """
    answers, known = list(answers), fastest(answers)
    if known.schedule is None or deadline.passed:
        return answers
    index = next(index for index, each in enumerate(answers) if each is known)
    started_s = now_s()
    proposal = refine(
        known.graph,
        budget_bytes=request.available_bytes,
        time_limit_s=deadline.left_s,
        known=known.schedule,
        proven_s=best(answers).lower_bound_s,
    )
    # What is proven for all variants bounds this one, whose own bound may be higher.
    proven_s = max(known.lower_bound_s, proposal.lower_bound_s)
    proposal = dataclasses.replace(proposal, lower_bound_s=proven_s)
    found = judged(known.graph, request, proposal, plain=plain, started_s=started_s)
    answers[index] = dataclasses.replace(
        fastest([known, found]), timed_out=known.timed_out or found.timed_out
    )
    return answers
