"""Watch the first steps of plans.

They show which outputs the training does not hold, and how much memory a loss outside of the model
takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from graphs.graph import warn
from graphs.model_calls import device_of
from scheduler_runtime.execute import BoundProgram
from scheduler_runtime.fitting.held_outputs import watch_outputs
from scheduler_runtime.fitting.loss_outside import LossSeen
from scheduler_runtime.fitting.loss_reserve import LossReserve
from scheduler_runtime.fitting.options import Fitted
from scheduler_runtime.fitting.pending_plans import DROPS, PendingPlan, PendingPlans
from solver.sizes_deadlines_progress import format_both

ShowFigures = Callable[[PendingPlan, Fitted, str], None]
"""Called with a plan, the same plan with new figures, and the reason for these."""

DropProgram = Callable[[BoundProgram], None]
"""Called with the program of an outdated plan."""


class FirstSteps:
    """Watches the first steps of one module's plans.

    loss: what is reserved for a loss outside of the model.
    outdated: plans that need to be replaced, as their first step has shown.
    """

    def __init__(self, loss: LossReserve) -> None:
        self.loss = loss
        self.outdated = PendingPlans()
        self._awaiting_outputs, self._awaiting_loss = PendingPlans(), PendingPlans()

    def expect(self, pending: PendingPlan, *, n_most: int) -> None:
        """Wait for the first step of this plan. n_most: how many plans wait at once, at most."""
        for plans in (
            self._awaiting_outputs,
            *([] if pending.loss is None else [self._awaiting_loss]),
        ):
            plans.append(pending)
            del plans[:-n_most]

    def watch(
        self,
        output: Any,
        *,
        known: Callable[[], Iterable[torch.Tensor]],
        model: nn.Module,
        show: ShowFigures,
        drop: DropProgram,
    ) -> None:
        """If this output is from a plan's first step, watch what the training does with it.

        known: the tensors that the plan counts already.
        show: called with new figures of the plan.
        drop: called if the plan is outdated.
        """
        if (pending := self._awaiting_outputs.of_output(output)) is not None:
            watch_outputs(output, partial(self._outputs_seen, pending, show))
        if (pending := self._awaiting_loss.of_output(output)) is not None:
            on_seen = partial(self._loss_seen, pending, show, drop)
            if not self.loss.extend_watch(output, on_seen):
                costs, device = pending.costs, device_of(model)
                self.loss.watch(output, known(), costs=costs, device=device, on_seen=on_seen)

    def _outputs_seen(
        self, pending: PendingPlan, show: ShowFigures, dropped: Sequence[int]
    ) -> None:
        """The backward pass of a plan's first step begins.

        dropped: indices of the flat outputs that the training does not hold any more.
        """
        # of several passes, the first to go backward counts
        if pending not in self._awaiting_outputs:
            return
        self._awaiting_outputs.remove(pending)
        if (fitted := pending.with_dropped_outputs(dropped)) is not None:
            show(pending, fitted, DROPS)

    def _mark_outdated(self, pending: PendingPlan, drop: DropProgram) -> None:
        """Make the next call of the plan's kind be planned again."""
        drop(pending.program)
        if pending not in self.outdated:
            self.outdated.append(pending)

    def _loss_seen(
        self,
        pending: PendingPlan,
        show: ShowFigures,
        drop: DropProgram,
        seen: LossSeen | None,
        reached: Sequence[bool],
    ) -> None:
        """The backward pass of a plan's first step begins.

        seen: what the loss has taken (None: not all of it was seen).
        reached: for each output of the program, whether it gets a gradient.
        """
        expected = {index for index, _ in pending.program.program.tangents}
        if expected != {index for index, each in enumerate(reached) if each}:
            return  # the step runs again at once, with a plan for the gradients that have arrived
        if pending in self._awaiting_loss:  # unless another backward pass has removed it already
            self._awaiting_loss.remove(pending)
        if seen is None:
            return
        if (words := pending.budget_warning(seen)) is not None:
            warn(words)
        if pending.is_outdated(seen):
            self._mark_outdated(pending, drop)
        else:
            taken, reserved = seen.for_outputs(pending.outputs), pending.loss
            assert reserved is not None
            sizes = f"{format_both(taken.reserved)}, {format_both(reserved.reserved)} were reserved"
            show(pending, pending.with_loss(taken), f"the loss takes {sizes}")
