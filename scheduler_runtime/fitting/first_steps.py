"""What the first steps of plans show: outputs that the training does not hold, and what a loss
outside of the model takes."""

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
"""Called with a plan, the plan with the figures that its first step has shown, and why."""

Drop = Callable[[BoundProgram], None]
"""Called with the program of an outdated plan."""


class FirstSteps:
    """loss: what is reserved for it.
    outdated: plans that a step has shown to be in need of another.
    """

    def __init__(self, loss: LossReserve) -> None:
        self.loss = loss
        self.outdated = MadePlans()
        self._of_outputs, self._of_loss = MadePlans(), MadePlans()

    def expect(self, made: Made, *, most: int) -> None:
        """The first step of this plan comes. most: so many plans wait for theirs."""
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
        """See what comes of this output of a forward pass.

        known: what the plan counts already.
        """
        if (made := self._of_outputs.of_output(output)) is not None:
            watch_outputs(output, partial(self._outputs_seen, made, show))
        if (made := self._of_loss.of_output(output)) is not None:
            then = partial(self._loss_seen, made, show, drop)
            if not self.loss.goes_on(output, then):
                costs, device = made.costs, device_of(model)
                self.loss.watch(output, known(), costs=costs, device=device, then=then)

    def _outputs_seen(self, made: Made, show: Show, gone: Sequence[int]) -> None:
        """The backward pass of a plan's first step begins; these flat outputs are not held."""
        if made not in self._of_outputs:  # one for several forward passes begins in the last
            return
        self._of_outputs.remove(made)
        if (fitted := made.without(gone)) is not None:
            show(made, fitted, DROPS)

    def _is_outdated(self, made: Made, drop: Drop) -> None:
        """The next call of its kind is planned anew."""
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
        """What the loss took in the first step of a plan is known; its backward pass begins."""
        expected = {index for index, _ in made.program.program.tangents}
        if expected != {index for index, each in enumerate(reached) if each}:
            return  # planned anew at once, for the gradients that there are
        if made in self._of_loss:  # not yet by a backward pass in between
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
