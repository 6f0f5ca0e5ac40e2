"""The forward that `fit` gives a module: it plans each kind of call when it first comes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphs.capture import Capture
from graphs.graph import warn
from graphs.model_calls import Call
from scheduler_runtime.execute import (
    ArrivedGradients,
    BoundProgram,
    StepProgram,
    checkpointed_as_whole,
)
from scheduler_runtime.fitting.first_steps import FirstSteps
from scheduler_runtime.fitting.held_optimizers import HeldOptimizers
from scheduler_runtime.fitting.in_flight import InFlight
from scheduler_runtime.fitting.loss_reserve import LossReserve
from scheduler_runtime.fitting.options import FitError, Fitted
from scheduler_runtime.fitting.pending_plans import PendingPlan, PendingPlans
from scheduler_runtime.fitting.plan_history import PlanHistory
from scheduler_runtime.fitting.planning_part import PlanningPart
from scheduler_runtime.fitting.tighter_plans import Ladder, current_program
from scheduler_runtime.fitting.why_another_plan import why_other_gradients
from scheduler_runtime.host_memory import bring_back
from scheduler_runtime.measuring import resident_tensors
from scheduler_runtime.surroundings import buckets_of, has_gradients
from solver.sizes_deadlines_progress import tell


class FittedForward(PlanningPart):
    """Plans each kind of call, in training mode. whole, parts: as in `CalledPart`.

    expects_backward: whether backward passes follow; if not, the module's own forward runs and
        saves nothing. It is recomputed if gradients come all the same (`torch.autograd.grad`).
    """

    made_by = "fit"
    expects_backward = True
    _parts: tuple[FittedForward, ...]

    @property
    def plans(self) -> tuple[Fitted, ...]:
        """The plans of this module and of the parts that the training may call, oldest first."""
        forwards = (self, *self._parts)
        return tuple(plan for each in forwards for plan in each._history.plans)

    def expect_backward(self, expected: bool) -> None:
        """Set `expects_backward`, also for the parts."""
        for each in (self, *self._parts):
            each.expects_backward = expected

    def __getstate__(self) -> dict[str, Any]:
        """The optimizer and the plans belong to the original, not to a copy of the module."""
        return {
            **super().__getstate__(),
            "_is_copy": True,
            "_optimizers": HeldOptimizers(),
            "_history": PlanHistory(),
            "attempt": None,
            "_first_steps": FirstSteps(LossReserve(self.options.loss_reserve)),
            "_ahead": PendingPlans(),
            "_in_flight": InFlight(self.options),
        }

    def restore(self) -> None:
        self._first_steps.loss.stop_watching()
        for optimizer in self._optimizers.existing():
            for each in (self, *self._parts):
                bring_back(optimizer, owner=each)
        super().restore()

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="the module has a plan from fit, which runs operator by operator; "
        "checkpoint_solver.remove(model) undoes it"
    )
    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._first_steps.loss.end_if_over()
        with self._first_steps.loss.pass_not_watched():
            output = super().run(*args, **kwargs)
        self._first_steps.watch(
            output,
            known=lambda: resident_tensors(
                self._whole_model(), (args, kwargs), self._optimizers.existing()
            ),
            model=self._model,
            show=functools.partial(self._history.update_figures, title=type(self._model).__name__),
            drop=self._drop_outdated,
        )
        self._programs.drop_all(self._in_flight.record_output(output, self._model))
        return output

    def begin(self) -> None:
        if self._is_copy and self.options.optimizer_state == "host":
            raise FitError(
                "this model is a copy of a fitted one, whose optimizer belongs to the original, so "
                "no state can be on the host: remove(model), then fit(model, optimizer=optimizer, "
                "...) with the one that trains the copy"
            )
        # passes without gradients are not planned, so they leave a watch of the loss on
        if self._in_flight.is_next_step():
            self._first_steps.loss.stop_watching()
        self._optimizers.release_used(type(self._model).__name__)
        super().begin()

    def covers(self) -> bool:
        return self._model.training and self.expects_backward

    def unplanned(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch is not None and (self._model.training or torch.is_grad_enabled()):
            self.watch.note_unplanned_pass()
        if torch.is_grad_enabled() and not self.expects_backward:
            return checkpointed_as_whole(self._model, super().unplanned, args, kwargs)
        return super().unplanned(*args, **kwargs)

    def situation(self) -> Any:
        buckets = buckets_of(self._model)
        return (
            has_gradients(self._model, buckets),
            buckets,
            self._expected_gradients,
            self._in_flight.n,
        )

    def kind_for(self, program: StepProgram, call: Call) -> Any:
        """As in the base class. The programs of a ladder are made from one trace."""
        return super().kind_for(current_program(program), call)

    def plan_ahead(self, call: Call) -> None:
        """Plan for a call as if it came now, without running it."""
        self.begin()
        kind = self.kind(call)
        self._unread.compare(self._programs.call_kinds(), kind[0], self._model)
        if any(each.find(kind, self._model, call) for each in (self._ahead, self._programs)):
            return
        found = self._plan_call(call, held_bytes=0, is_ahead=True)
        if isinstance(found, Ladder):
            self._programs.add(self.kind_for(found, call), found)
        else:
            self._ahead.append(found)

    def _drop_outdated(self, program: StepProgram) -> None:
        """Forget a program: the next call of its kind, in any copy, needs a new one."""
        self._programs.drop(program)
        self._shared.drop(program)

    def program_for(self, call: Call) -> BoundProgram | Ladder:
        waiting = self.kind(call), self._model, call
        found: PendingPlan | Ladder
        if (ahead := self._ahead.take(*waiting)) is not None:
            found = ahead
        elif (outdated := self._first_steps.outdated.take(*waiting)) is None:
            if (shared := self._program_of_other_copy(call)) is not None:
                return shared
            found = self._plan_call(call, held_bytes=0)
        else:
            try:
                found = self._plan_call(call, held_bytes=0, instead_of=outdated)
            except FitError as error:
                warn(f"fit: {error}. The earlier plan stays in use")
                return outdated.program
        if isinstance(found, Ladder):
            return found
        self._first_steps.expect(found, n_most=self.n_kept)
        return found.program

    def _program_for_gradients(
        self,
        call: Call,
        reached: ArrivedGradients,
        held_bytes: int,
        *,
        planned: Capture,
        returned_bytes: int,
    ) -> BoundProgram:
        """A program for the gradients that have arrived; later calls are planned for these, too.

        reached: the gradients that have arrived.
        held_bytes: what the first forward pass holds, except for the outputs that it returned.
        planned: what was traced for the plan that the step has begun with.
        returned_bytes: bytes of these outputs.
        """
        self._expected_gradients = reached
        held_bytes += returned_bytes
        of_call, situation = self.kind(call)
        program = self._programs.find(((of_call, held_bytes), situation), self._model, call)
        if program is None:
            tell(f"{type(self._model).__name__}: {why_other_gradients(planned, reached)}")
            with _disable_current_modes():  # modes of the training must not see the planning
                found = self._plan_call(call, held_bytes=held_bytes)
            program = found.program if isinstance(found, PendingPlan) else found
            serves_all = False
            if isinstance(found, PendingPlan):
                serves_all = not found.fitted.solution.overhead  # later calls use it, too
                if serves_all:
                    self._first_steps.expect(found, n_most=self.n_kept)
                else:
                    self._history.single_step_plans.append(found.fitted)
            of_call, situation = self.kind_for(program, call)
            self._programs.add(
                ((of_call, held_bytes), situation),
                program,
                other_kind=(of_call, situation) if serves_all else None,
            )
        return current_program(program)
