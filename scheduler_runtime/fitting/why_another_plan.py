"""Say how a call differs from those that were planned before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from graphs.model_calls import Call
from graphs.trace import CapturedStep
from scheduler_runtime.planned import Difference, Plan, difference, values_difference
from solver.schedule import Solution

N_COMPARED = 4
"""How many of the earlier plans are compared: the latest ones."""
_OF_STATE = "something that forward depends on, besides its arguments, has changed"


def why_another(
    solutions: Sequence[Solution],
    model: nn.Module,
    call: Call,
    step: CapturedStep,
    *,
    changed: Callable[[], str | None],
) -> Difference | None:
    """How a call differs from earlier plans of the same step; None: there are none.

    A step with other gradients, before it or of the outputs, is another step, so it is not compared
    with these plans.

    solutions: the earlier plans.
    step: the step, traced for this call.
    changed: describes what has changed in the model or in torch's settings since the last plan.
    """
    here = step.graph.meta.environment
    same_step = ("gradients", "gradient_outputs", "gradient_layouts")
    plans = [
        Plan.of(solution)
        for solution in solutions
        if all(solution.environment.get(field) == here.get(field) for field in same_step)
    ]
    alike = [plan for plan in plans if plan.environment["shapes"] == here["shapes"]]
    found = [
        difference(plan, call, model, part)
        # a graph may be the same with other values, such as another position in a buffer
        or values_difference(plan, part, part.meta.environment["arguments"])
        for plan in alike[-N_COMPARED:]
        for part in (step.with_rewrites(plan.rewrites).graph.module_part(),)
    ]
    if not alike:  # the shapes differ, which needs no comparison of operators
        found = [difference(plan, call, model) for plan in plans[-1:]]
    if None in found:
        return Difference(changed() or _OF_STATE)
    return found[-1] if found else None
