"""Say how a call differs from those that were planned before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.utils import _pytree as pytree

from graphs.capture import Capture
from graphs.model_calls import Call, LayoutForShapes, nested
from graphs.trace import CapturedStep
from scheduler_runtime.execute import ArrivedGradients
from scheduler_runtime.planned import Difference, Plan, difference, values_difference
from solver.schedule import Solution

N_COMPARED = 4
"""How many of the earlier plans are compared: the latest ones."""
N_NAMED = 3
"""How many outputs a message names."""
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


def why_other_gradients(planned: Capture, arrived: ArrivedGradients) -> str:
    """How the gradients that arrive at the outputs differ from those that were planned for.

    planned: what was traced for the plan.
    """
    at, expected = set(arrived.outputs), set(planned.gradient_outputs)
    if at == expected:
        return (
            f"the gradient of {_outputs(planned, at)} arrives in another memory layout than "
            "planned, so the step is planned again, for this run and for later ones"
        )
    reason = (
        f"gradients arrive for {_outputs(planned, at)}, planned for {_outputs(planned, expected)}, "
        "so the step is planned again, for this run and for later ones"
    )
    outputs = {index: planned.outputs[index].meta["val"] for index in at}
    own_layouts = {index: LayoutForShapes.of(output) for index, output in outputs.items()}
    if any(layout != own_layouts[index] for index, layout in arrived.layouts):
        return reason  # this layout would need another plan all the same
    return f"{reason}. Remedy: say which outputs the loss reads, fit(..., loss_outputs=...)"


def _outputs(captured: Capture, indices: set[int]) -> str:
    """The outputs by their paths, as in "output['logits'], output['scale'] and 2 more"."""
    paths = nested.paths(captured.output_spec)
    of_model = 1 if captured.left else 0  # with attributes left behind, the output is in a pair
    names = ["output" + pytree.keystr(paths[index][of_model:]) for index in sorted(indices)]
    more = len(names) - N_NAMED
    return ", ".join(names[:N_NAMED]) + (f" and {more} more" if more > 0 else "")
