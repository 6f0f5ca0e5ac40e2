"""Once all variants of a step are planned: refine the fastest plan, then spend minutes on bounds.

Refining each variant right after its planning would take time from later variants, which may be
faster. Refining all of them afterwards would help little, since the fastest plan usually belongs to
the variant with the most room. So the fastest plan is carried over to every variant. Of the
variants in which it fits and is no slower, the last one, which rewrites the most, is refined.

The step's bound is the least of its variants' bounds, so the time for more proof goes to the
variant with the least bound, until that is one that was tried before. Variants that were skipped
during planning need no more proof: their bounds are no better than the best plan's time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from solver.methods import Proposal, transfer_schedule
from solver.schedule import Schedule, Solution, simulate_if_legal
from solver.sizes_deadlines_progress import Deadline
from solver.solving.answers import fastest, solution_from_proposal, time_s


def with_fastest_refined(
    answers: Sequence[Solution], *, refine: Callable[..., Proposal], deadline: Deadline
) -> list[Solution]:
    """Return the answers, one of them perhaps with a faster schedule.

    answers: the solutions of the variants, in the order of planning.
    refine: see `solver.methods.Method`.
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
    proposal = refine(
        to_refine.graph,
        budget_bytes=to_refine.request.available_bytes,
        time_limit_s=deadline.left_s,
        start=to_refine.schedule,
        proven_s=to_refine.lower_bound_s,
    )
    refined = _improved(to_refine, proposal)
    return [refined if answer is to_refine else answer for answer in answers]


def with_more_proven(
    answers: Sequence[Solution], *, prove_more: Callable[..., Proposal], deadline: Deadline
) -> list[Solution]:
    """Return the answers, some with a higher bound and perhaps a faster schedule.

    answers: the solutions of the variants.
    prove_more: see `solver.methods.Method`.
    deadline: when the work has to end.
    """
    answers, tried = list(answers), set[int]()
    while not deadline.passed and fastest(answers).schedule is not None:
        weakest = min(range(len(answers)), key=lambda index: answers[index].lower_bound_s)
        if weakest in tried:
            break
        tried.add(weakest)
        variant_answer = answers[weakest]
        proposal = prove_more(
            variant_answer.graph,
            budget_bytes=variant_answer.request.available_bytes,
            # an equal share of the time left for each variant that was not tried yet
            time_limit_s=deadline.left_s / (1 + len(answers) - len(tried)),
            proven_s=variant_answer.lower_bound_s,
            known_s=time_s(fastest(answers)),
        )
        answers[weakest] = _improved(variant_answer, proposal)
    return answers


def _improved(answer: Solution, proposal: Proposal) -> Solution:
    """The faster of the answer and the proposal for the same variant, with the better bound."""
    found = solution_from_proposal(answer.graph, answer.request, proposal, baseline=answer.baseline)
    return dataclasses.replace(
        fastest([answer, found]), timed_out=answer.timed_out or found.timed_out
    ).with_bound(max(answer.lower_bound_s, found.lower_bound_s))


def _with_schedule_if_fitting(schedule: Schedule, answer: Solution, *, most_s: float) -> Solution:
    """The answer with another variant's schedule, if that is legal here, fits, and takes at most
    `most_s` seconds; else the answer unchanged.
    """
    if schedule is answer.schedule:
        return answer
    moved = transfer_schedule(answer.graph, schedule)
    simulation = simulate_if_legal(answer.graph, moved)
    if simulation is None or answer.request.excess(simulation) or simulation.time_s > most_s:
        return answer
    found = dataclasses.replace(answer, schedule=moved, simulation=simulation, status="feasible")
    return found.with_bound(answer.lower_bound_s)
