"""The traced step of one kind of call, with everything that a plan for it has to count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphs.costs import CostModel
from graphs.graph import Graph, warn
from graphs.passes import Passes, with_passes
from graphs.rewrites import variants_of
from graphs.trace import CapturedStep
from graphs.training_step import with_resident
from scheduler_runtime.fitting.loss_outside import LossBytes
from scheduler_runtime.fitting.memory_beside_module import OtherMemory
from scheduler_runtime.planned import NewPlan, new_plan
from solver.methods import KnownPlan
from solver.schedule import Places, Request
from solver.sizes_deadlines_progress import format_both

_SHARE_OF_FIRST = 0.05
"""Share of the time limit for a plan with the cautious reserve of a first step, since it is
probably made again afterwards."""


@dataclass(frozen=True)
class StepToPlan:
    """A step and what its plan has to count.

    step: the module's own step, without rewrites.
    other_memory: what else is on the device.
    losses: what to count for a loss outside of the model; the first that fits is used (empty: the
        loss is inside).
    outputs: the outputs that get a gradient.
    request: budget and options for the solver.
    notes: sentences on what is counted and what is not.
    kept_bytes: what a step keeps, or has kept, in order to run again.
    keeps_gradients: whether the gradients of the outputs are held to the end of the step, since its
        backward pass may have to run again.
    passes: the forward passes that wait for one backward pass.
    others_bytes: what is counted at least for each other pass in flight.
    costs: the cost model that the step was traced with.
    """

    step: CapturedStep
    other_memory: OtherMemory
    losses: tuple[LossBytes, ...]
    outputs: tuple[torch.Tensor, ...]
    request: Request
    notes: tuple[str, ...]
    kept_bytes: int
    keeps_gradients: bool
    passes: Passes
    others_bytes: int
    costs: CostModel

    def with_limit(self, available_bytes: int) -> StepToPlan:
        """The same step with another limit for its peak."""
        budget_bytes = available_bytes + self.request.reserve_bytes
        return replace(self, request=replace(self.request, budget_bytes=budget_bytes))

    def without_disk(self, held_bytes: int) -> StepToPlan:
        """The same step, run again without the disk while the first run still holds these bytes."""
        request, places = self.request, self.request.places
        alone = Places(host=None if places is None else places.host)
        again = replace(self, request=replace(request, places=alone), keeps_gradients=True)
        return again.with_limit(request.available_bytes - held_bytes)

    def with_state(self, where: str) -> StepToPlan:
        """The same step with another place for the optimizer's state, as in `Request`."""
        return replace(self, request=replace(self.request, optimizer_state=where))

    def plan(self, known: Sequence[KnownPlan]) -> tuple[NewPlan, LossBytes | None]:
        """The best plan found, and the loss that it counts.

        known: plans of the same module for other calls.
        """
        if not self.losses:
            return self._plan_with_loss(None, known), None
        for loss in self.losses:
            found = self._plan_with_loss(loss, known)
            if found.solution.schedule is not None:
                break
        most_held = self.losses[0].held
        if found.solution.schedule is not None and most_held and not loss.held:
            warn(
                f"fit: the budget holds only for a loss that keeps nothing while the model's "
                f"backward pass runs. One that does, for example targets as large as the outputs, "
                f"may take up to {format_both(most_held)} more (loss_reserve= says what the loss "
                "takes)"
            )
        return found, loss

    def _plan_with_loss(self, loss: LossBytes | None, known: Sequence[KnownPlan]) -> NewPlan:
        request = self.request
        if loss is not None and loss.is_cautious:
            request = replace(request, time_limit_s=_SHARE_OF_FIRST * request.time_limit_s)

        def with_loss_and_rest(graph: Graph) -> Graph:
            return self.other_memory.add_to(graph if loss is None else loss.add_to(graph))

        def with_passes_in_flight(graph: Graph, others_bytes: int) -> Graph:
            loss_bytes = None if loss is None else 0  # `loss` counts all passes already
            return with_passes(graph, self.passes, others_bytes=others_bytes, loss_bytes=loss_bytes)

        def surround_unplanned(graph: Graph) -> Graph:
            return with_passes_in_flight(with_loss_and_rest(graph), 0)

        def surround(graph: Graph) -> Graph:
            kept_bytes = self.passes.n * self.kept_bytes
            graph = with_resident(with_loss_and_rest(graph), "kept_to_run_again", kept_bytes)
            if self.keeps_gradients:  # as outputs of the graph, they are live to its end
                tangents = (t.name for t in graph.tensors if t.kind == "tangent")
                kept = [name for name in tangents if name in graph.producer]
                graph = replace(graph, outputs=(*graph.outputs, *kept))
            return with_passes_in_flight(graph, self.others_bytes)

        planned = variants_of(self.request.rewrites)
        return new_plan(
            self.step,
            surround,
            request,
            planned=planned,
            known=known,
            surround_unplanned=surround_unplanned,
        )
