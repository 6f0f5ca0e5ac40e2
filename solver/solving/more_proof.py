"""Spend minutes on better bounds, once all variants of a step are planned and a gap is left.

The step's bound is the least of its variants' bounds, so the time goes to the variant with the
least bound, until that is one that was tried before. Variants that were skipped during planning
need no more proof: their bounds are no better than the best plan's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from graphs.graph import Graph
from solver.methods import Proposal
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import Deadline, now_s
from solver.solving.answers import fastest, solution_from_proposal, time_s


def with_more_proven(
    answers: Sequence[Solution],
    request: Request,
    *,
    prove_more: Callable[..., Proposal],
    plain: Graph,
    deadline: Deadline,
) -> list[Solution]:
    """Return the answers, some with a higher bound and perhaps a faster schedule.

    answers: the solutions of the variants.
    prove_more: see `solver.methods.Method`.
    plain: the step without rewrites.
    deadline: when the work has to end.
    """
    answers, tried = list(answers), set[int]()
    while not deadline.passed and fastest(answers).schedule is not None:
        weakest = min(range(len(answers)), key=lambda index: answers[index].lower_bound_s)
        if weakest in tried:
            break
        tried.add(weakest)
        # An equal share of the time left for each variant that was not tried yet.
        variant_answer, started_s = answers[weakest], now_s()
        proposal = prove_more(
            variant_answer.graph,
            budget_bytes=request.available_bytes,
            time_limit_s=deadline.left_s / (1 + len(answers) - len(tried)),
            proven_s=variant_answer.lower_bound_s,
            known_s=time_s(fastest(answers)),
        )
        found = solution_from_proposal(
            variant_answer.graph, request, proposal, plain=plain, started_s=started_s
        )
        answers[weakest] = dataclasses.replace(
            fastest([variant_answer, found]), timed_out=variant_answer.timed_out or found.timed_out
        ).with_bound(found.lower_bound_s)
    return answers
