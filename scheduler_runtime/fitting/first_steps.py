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
from scheduler_runtime.fitting.first_planned_step import DROPS, Made, MadePlans
from scheduler_runtime.fitting.held_outputs import watch_outputs
from scheduler_runtime.fitting.loss_outside import LossSeen
from scheduler_runtime.fitting.loss_reserve import LossReserve
from scheduler_runtime.fitting.options import Fitted
from solver.sizes_deadlines_progress import format_both

Show = Callable[[Made, Fitted, str], None]
"""Called with a plan, the same plan with new figures, and the reason for these."""

Drop = Callable[[BoundProgram], None]
"""Called with the program of an outdated plan."""


class FirstSteps:
    """Watches the first steps of one module's plans.

    loss: what is reserved for a loss outside of the model.
    outdated: plans that need to be replaced, as their first step has shown.
    """

    def __init__(self, loss: LossReserve) -> None:
        self.loss = loss
        self.outdated = MadePlans()
        self._of_outputs, self._of_loss = MadePlans(), MadePlans()

    def expect(self, made: Made, *, most: int) -> None:
        """Wait for the first step of this plan. most: how many plans wait at once, at most."""
        for plans in (self._of_outputs, *([] if made.loss is None else [self._of_loss])):
            plans.append(made)
            del plans[:-most]

    def watch(
        self,
        output: Any,
        *,
        known: Callable[[], Iterable[torch.Tensor]],
        model: nn.Module,
        show: Show,
        drop: Drop,
    ) -> None:
        """If this output is from a plan's first step, watch what the training does with it.

        known: the tensors that the plan counts already.
        show: called with new figures of the plan.
        drop: called if the plan is outdated.
        """
        if (made := self._of_outputs.of_output(output)) is not None:
            watch_outputs(output, partial(self._outputs_seen, made, show))
        if (made := self._of_loss.of_output(output)) is not None:
            then = partial(self._loss_seen, made, show, drop)
            if not self.loss.goes_on(output, then):
                costs, device = made.costs, device_of(model)
                self.loss.watch(output, known(), costs=costs, device=device, then=then)

    def _outputs_seen(self, made: Made, show: Show, gone: Sequence[int]) -> None:
        """The backward pass of a plan's first step begins. gone: flat outputs not held any more."""
        if made not in self._of_outputs:  # of several passes, the first to go backward counts
            return
        self._of_outputs.remove(made)
        if (fitted := made.without(gone)) is not None:
            show(made, fitted, DROPS)

    def _is_outdated(self, made: Made, drop: Drop) -> None:
        """Make the next call of the plan's kind be planned again."""
        drop(made.program)
        if made not in self.outdated:
            self.outdated.append(made)

    def _loss_seen(
        self,
        made: Made,
        show: Show,
        drop: Drop,
        seen: LossSeen | None,
        reached: Sequence[bool],
    ) -> None:
        """The backward pass of a plan's first step begins.

        seen: what the loss has taken (None: not all of it was seen).
        reached: for each output of the program, whether it gets a gradient.
        """
        expected = {index for index, _ in made.program.program.tangents}
        if expected != {index for index, each in enumerate(reached) if each}:
            return  # the step runs again at once, with a plan for the gradients that have arrived
        if made in self._of_loss:  # unless another backward pass has removed it already
            self._of_loss.remove(made)
        if seen is None:
            return
        if (words := made.exceeds(seen)) is not None:
            warn(words)
        if made.is_outdated(seen):
            self._is_outdated(made, drop)
        else:
            taken, reserved = seen.for_outputs(made.outputs), made.loss
            assert reserved is not None
            sizes = f"{format_both(taken.reserved)}, {format_both(reserved.reserved)} were reserved"
            show(made, made.with_loss(taken), f"the loss takes {sizes}")
