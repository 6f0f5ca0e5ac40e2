"""Plans of `fit` that wait for their first step.

The first step shows how much memory a loss outside of the model takes, and which outputs the
training holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphs.costs import CostModel
from graphs.model_calls import Call, nested
from scheduler_runtime.execute import BoundProgram, program_of_output
from scheduler_runtime.fitting.as_seen import with_dropped, with_loss
from scheduler_runtime.fitting.loss_outside import LossBytes, LossSeen, peak_with
from scheduler_runtime.fitting.options import Fitted
from scheduler_runtime.planned import plan_summary
from solver.sizes_deadlines_progress import format_both, format_size_up

DROPS = "the training drops outputs of the model, such as logits, before backward()"
NOTABLE_SHARE = 0.01
"""If the peak without a plan turns out to differ by more than this share, a message says so."""


@dataclass(eq=False)
class PendingPlan:
    """A plan, with what it was made for.

    kind: the kind of call.
    program: runs the plan.
    fitted: the plan, updated by what its first step has shown.
    loss: what is counted for a loss outside of the model (None: the loss is inside).
    outputs: the outputs that get a gradient.
    costs: the cost model that it was planned with.
    names: index of a flat output -> its tensor in the graph.
    """

    kind: Any
    program: BoundProgram
    fitted: Fitted
    loss: LossBytes | None
    outputs: tuple[torch.Tensor, ...]
    costs: CostModel
    names: Mapping[int, str]

    def replacement_line(self, new: Fitted, loss: LossBytes | None) -> str:
        """The message about a new plan that replaces this one."""
        line = plan_summary(new.solution, is_reused=new.reused, took_s=new.took_s)
        reasons = []
        if loss is not None and self.loss is not None and loss.reserved != self.loss.reserved:
            reasons.append(
                f"the loss takes {format_both(loss.reserved)} and "
                f"{format_both(self.loss.reserved)} were reserved"
            )
        return f"{line}: planned again, since {' and '.join(reasons)}"

    def with_loss(self, loss: LossBytes) -> Fitted:
        """The plan with other figures: for a loss that takes this much."""
        solution = with_loss(self.fitted.solution, loss)
        old = None if self.loss is None else self.loss.note
        notes = tuple(loss.note if each == old else each for each in self.fitted.notes)
        return replace(self.fitted, solution=solution, notes=notes)

    def with_dropped_outputs(self, indices: Sequence[int]) -> Fitted | None:
        """The plan with other figures: for a training that drops these flat outputs before its
        backward pass. None: they stay the same."""
        solution = self.fitted.solution
        dropped = {self.names[index] for index in indices if index in self.names}
        names = [name for name in solution.graph.returned if name in dropped]
        found = with_dropped(solution, names)
        less_bytes = solution.baseline.peak_bytes - found.baseline.peak_bytes
        if not less_bytes:
            return None
        if less_bytes < NOTABLE_SHARE * solution.baseline.peak_bytes:
            return replace(self.fitted, solution=found)
        note = (
            f"{DROPS}, so without a plan its step takes {format_both(less_bytes)} less than one "
            "that keeps them; the plan has room for them, in case a later step keeps them"
        )
        return replace(self.fitted, solution=found, notes=(*self.fitted.notes, note))

    def budget_warning(self, seen: LossSeen) -> str | None:
        """A warning if the step in which this loss was seen exceeds the budget, else None."""
        assert self.loss is not None
        taken, solution = seen.in_first_step, self.fitted.solution
        available_bytes = solution.request.available_bytes
        step_bytes = peak_with(solution, self.loss, taken)
        if step_bytes <= available_bytes:
            return None
        return (
            f"fit: the loss takes {format_both(taken.reserved)} besides the outputs and their "
            f"gradients, {format_both(self.loss.reserved)} were reserved: this step takes up to "
            f"{format_both(step_bytes)}, {format_size_up(step_bytes - available_bytes)} more than "
            f"the {format_both(available_bytes)} available. Everything that runs between the "
            "model's forward and backward pass counts as the loss (other modules, calls without "
            "gradients). The next step is planned for it; give loss_reserve= to avoid this"
        )

    def is_outdated(self, seen: LossSeen) -> bool:
        """Whether later steps with this loss need another plan, or may get a faster one."""
        assert self.loss is not None
        later, solution = seen.for_outputs(self.outputs), self.fitted.solution
        if peak_with(solution, self.loss, later) > solution.request.available_bytes:
            return True
        is_less = self.loss.is_cautious and later.reserved < self.loss.reserved
        return is_less and bool(solution.overhead)


class PendingPlans(list[PendingPlan]):
    """Plans that wait for something: for their first step, or to be replaced."""

    def take(self, kind: Any, model: nn.Module, call: Call) -> PendingPlan | None:
        """The plan for this call, which is removed from the list."""
        if (found := self.find(kind, model, call)) is not None:
            self.remove(found)
        return found

    def of_output(self, output: Any) -> PendingPlan | None:
        """The plan whose program has made this output."""
        makers = [program_of_output(tensor) for tensor in nested.tensors(output)]
        found = (each for each in self if each.program.program in makers)
        return next(found, None)

    def find(self, kind: Any, model: nn.Module, call: Call) -> PendingPlan | None:
        """The plan for this call, of this kind."""
        found = (each for each in self if each.kind == kind and each.program.fits(model, call))
        return next(found, None)
