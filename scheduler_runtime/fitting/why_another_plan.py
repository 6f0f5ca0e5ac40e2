"""How a call differs from those that were planned before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from graphs.graph import Graph
from graphs.model_calls import Call
from graphs.trace import CapturedStep
from scheduler_runtime.planned import Difference, Plan, difference, values_difference
from solver.schedule import Solution

N_COMPARED = 4
"""Of the earlier plans, the latest."""
_OF_STATE = Difference("attributes or settings that forward depends on have changed")


def why_another(
    solutions: Sequence[Solution], model: nn.Module, call: Call, step: CapturedStep
) -> Difference | None:
    """None: it is the first of its step.

    Other gradients before the step or of the outputs make another step, not another call.
    """
    here = step.graph.meta.environment
    same_step = ("gradients", "gradient_outputs", "gradient_strides")
    plans = [
        Plan.of(solution)
        for solution in solutions
        if all(solution.environment.get(field) == here.get(field) for field in same_step)
    ]
    alike = [plan for plan in plans if plan.environment["shapes"] == here["shapes"]]
    found = [
        difference(plan, call, model, part) or _of_values(plan, part)
        for plan in alike[-N_COMPARED:]
        for part in (step.with_rewrites(plan.rewrites).graph.module_part(),)
    ]
    if not alike:  # other shapes are told without the operators
        found = [difference(plan, call, model) for plan in plans[-1:]]
    return _OF_STATE if None in found else found[-1] if found else None


def _of_values(plan: Plan, part: Graph) -> Difference | None:
    """Another position in a buffer, say, gives the same graph."""
    found = values_difference(plan, part, part.meta.environment["arguments"])
    return None if found is None else Difference(found, of_values=True)
