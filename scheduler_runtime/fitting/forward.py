"""The forward that `fit` puts on a module: a plan for each kind of call, made when it comes."""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphs.calls import Call, device_of
from graphs.costs import CostModel, default_costs, finish_measuring
from graphs.rewrites import variants_of
from graphs.trace import CapturedStep
from scheduler_runtime.execute import BoundProgram, build_program, kept_bytes, restore_forward
from scheduler_runtime.fitting.beside import Beside
from scheduler_runtime.fitting.gradient_outputs import gradient_outputs
from scheduler_runtime.fitting.loss_outside import LossBytes, loss_outside
from scheduler_runtime.fitting.options import FitError, Fitted, Options
from scheduler_runtime.fitting.shared_budget import SharedBudget
from scheduler_runtime.fitting.unplanned import Watch
from scheduler_runtime.planned import (
    Difference,
    NewPlan,
    Plan,
    PlannedForward,
    difference,
    module_schedule,
    new_plan,
    told,
    warn_of_another,
)
from scheduler_runtime.surroundings import (
    Buckets,
    buckets_of,
    no_checkpoints,
    refuse_checkpointing,
)
from solver.device_and_costs import WITH_OPAQUE_PARTS
from solver.methods import KnownPlan
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import counted, format_both, now_s, tell, telling_in_lines

logger = logging.getLogger(__name__)

N_COMPARED = 4
"""Of the earlier plans, the latest, to say how a call differs from them."""
_OF_STATE = Difference("attributes or settings that forward depends on have changed")


class FittedForward(PlannedForward):
    """Makes a plan for each kind of call, in training mode.

    whole: the module that `fit` was given, which this one is or is a part of.
    parts: such forwards on parts of this module that hold all that is trained. The training may
        call one of them in place of the module; what it calls first is planned, and its own parts
        run as they are.
    watch: shared by all of them, until one is called.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        optimizers: tuple[torch.optim.Optimizer, ...],
        *,
        whole: nn.Module,
        parts: Sequence[FittedForward],
    ) -> None:
        super().__init__(model)
        self.options = options
        self.watch: Watch | None = None
        self._own_plans: list[Fitted] = []
        self._said: set[str] = set()
        self._optimizers = optimizers
        self._whole: Callable[[], nn.Module | None] | None = weakref.ref(whole)
        self._parts = tuple(parts)
        self._budget = SharedBudget(options)
        self._reached: tuple[int, ...] | None = None

    @property
    def plans(self) -> tuple[Fitted, ...]:
        """Oldest first; those of the part that the training calls in place of this module."""
        return (*self._own_plans, *(plan for part in self._parts for plan in part._own_plans))

    def __getstate__(self) -> dict[str, Any]:
        """The optimizer and the plans belong to the original, not to a copy of the module."""
        of_original: dict[str, Any] = {
            "_optimizers": (),
            "_own_plans": [],
            "watch": None,
            "_whole": None,
        }
        return {**super().__getstate__(), **of_original}

    def begin(self) -> None:
        """This module is the one to plan: the training calls it."""
        if self.watch is not None:
            self.watch.end()
            self.watch = None
            whole = self._whole and self._whole()
            if whole is not None and whole is not self._model:
                path = next(path for path, m in whole.named_modules() if m is self._model)
                tell(
                    f"{type(whole).__name__}: the training calls its part {path} "
                    f"({type(self._model).__name__}) directly, so that is planned"
                )
        self._restore_parts()

    def restore(self) -> None:
        if self.watch is not None:
            self.watch.end()
        self._restore_parts()
        super().restore()

    def _restore_parts(self) -> None:
        for part in self._parts:
            restore_forward(part._model)
        self._parts = ()

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="the module has a plan from fit, which runs operator by operator; "
        "checkpoint_solver.remove(model) undoes it"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def covers(self) -> bool:
        return self._model.training

    def situation(self) -> Any:
        buckets = buckets_of(self._model)
        return self._accumulates(buckets), buckets, self._reached

    def program_for(self, call: Call) -> BoundProgram:
        return self._planned(call, held_bytes=0)

    def _for_gradients(
        self, call: Call, reached: tuple[int, ...], held_bytes: int, *, returned_bytes: int
    ) -> BoundProgram:
        """A program for gradients of these outputs, which later calls are planned for as well.

        held_bytes: what the first forward pass has left, beside the outputs that it returned.
        """
        held_bytes += returned_bytes
        logger.info("planning for gradients of the outputs %s only", reached)
        self._reached = reached
        kind = self.kind(call), held_bytes
        program = self._programs.find(kind, self._model, call)
        if not isinstance(program, BoundProgram):
            program = self._planned(call, held_bytes=held_bytes)
            self._programs.add(kind, program)
        return program

    def _planned(self, call: Call, *, held_bytes: int) -> BoundProgram:
        started_s = now_s()
        refuse_checkpointing(self._model)
        device, buckets = device_of(self._model), buckets_of(self._model)
        costs = self.options.costs or default_costs(device)
        whole = self._whole_model()
        request = self._budget.request(
            self._model, whole, call, self._optimizers, buckets=buckets, costs=costs
        )
        name = type(self._model).__name__
        with telling_in_lines(f"tracing {name}...") as say:
            step = self._step(call, request, buckets, costs)
            if not held_bytes:  # the step that runs again is given what the first pass has kept
                held_bytes = kept_bytes(step.captured, device)
            loss = loss_outside(step.captured, device, self.options)
            beside = Beside.of(
                self._model, whole, self._optimizers, costs, buckets=buckets, kept_bytes=held_bytes
            )
            notes = (*(() if loss is None else (loss.note,)), *self._notes(step, buckets))
            say(f"planning {name} ({counted(len(step.graph.nodes), 'op')})...")
            found = self._found(step, beside, loss, request)
            finish_measuring(costs)  # after planning, which may measure ops of other variants
        solution = found.solution
        if solution.schedule is None:
            raise FitError(
                f"no schedule of {name}'s step fits "
                f"{format_both(solution.request.available_bytes)} ({solution.status})"
                f"{solution.obstacle_text}"
            )
        reason = self._why_another(call, step)
        took_s = now_s() - started_s
        self._own_plans.append(Fitted(solution, notes, found.reused, took_s=took_s))
        self._tell(reason)
        return self._program(step, solution)

    def _step(
        self, call: Call, request: Request, buckets: Buckets | None, costs: CostModel
    ) -> CapturedStep:
        """The module's own step, without rewrites."""
        with no_checkpoints():
            step = self.traced(
                call,
                choose=self._gradient_outputs,
                gradients="accumulate" if self._accumulates(buckets) else "fresh",
                costs=costs,
                rewrites=(),
            )
        if request.places is not None and step.graph.meta.environment.get("opaque"):
            raise FitError(WITH_OPAQUE_PARTS)
        return step

    def _program(self, step: CapturedStep, solution: Solution) -> BoundProgram:
        """What runs the solution's schedule."""
        assert solution.schedule is not None
        step = step.with_rewrites(solution.graph.meta.rewrites)
        part = step.graph.module_part()
        returned_bytes = sum(part.tensor_by_name[name].size_bytes for name in part.returned)
        return BoundProgram(
            step,
            build_program(
                step,
                module_schedule(solution.schedule, part),
                places=solution.request.places,
                pools=self._pools,
            ),
            other=functools.partial(self._for_gradients, returned_bytes=returned_bytes),
        )

    def _found(
        self,
        step: CapturedStep,
        beside: Beside,
        loss: LossBytes | None,
        request: Request,
    ) -> NewPlan:
        known = [KnownPlan.of(each.solution) for each in self._own_plans if not each.reused]

        def plan(loss: LossBytes | None) -> NewPlan:
            return new_plan(
                step,
                lambda graph: beside.around(graph if loss is None else loss.around(graph)),
                request,
                planned=variants_of(self.options.rewrites),
                known=known,
            )

        found = plan(loss)
        if found.solution.schedule is not None or loss is None or not loss.held:
            return found
        least = plan(loss.without_held)
        if least.solution.schedule is None:
            return found
        warnings.warn(
            f"fit: the budget holds only for a loss that keeps nothing while the model's backward "
            f"pass runs: targets as large as the outputs, and the value of mse_loss, take up to "
            f"{format_both(loss.held)} more (loss_reserve= says what the loss takes)",
            stacklevel=2,
        )
        return least

    def _why_another(self, call: Call, step: CapturedStep) -> Difference | None:
        """How this call differs from the planned ones; None: it is the first of its step.

        Other gradients before the step or of the outputs make another step, not another call.
        """
        here = step.graph.meta.environment
        same_step = ("gradients", "gradient_outputs")
        plans = [
            Plan.of(each.solution)
            for each in self._own_plans
            if all(each.solution.environment[field] == here[field] for field in same_step)
        ]
        alike = [plan for plan in plans if plan.environment["shapes"] == here["shapes"]]
        found = [
            difference(
                plan,
                call,
                self._model,
                step.with_rewrites(plan.rewrites).graph.module_part(),
            )
            for plan in (alike or plans)[-N_COMPARED:]
        ]
        return _OF_STATE if None in found else found[-1] if found else None

    def _tell(self, reason: Difference | None) -> None:
        """The last plan in a line: a warning where a call like it was planned before."""
        new = self._own_plans[-1]
        line = told(new.solution, is_reused=new.reused, took_s=new.took_s)
        if reason is None:
            tell(line)
            return
        took_s = sum(each.took_s for each in self._own_plans)
        n_plans = len(self._own_plans)
        warn_of_another(line, reason, n_plans=n_plans, said=self._said, all_took_s=took_s)

    def _accumulates(self, buckets: Buckets | None) -> bool:
        """Whether gradients exist before the step."""
        if buckets is not None and buckets.are_gradients:
            return True
        return any(p.grad is not None for p in self._model.parameters() if p.requires_grad)

    def _gradient_outputs(self, output: Any) -> tuple[int, ...]:
        loss_outputs = self.options.loss_outputs
        return gradient_outputs(output, reached=self._reached, loss_outputs=loss_outputs)

    def _notes(self, step: CapturedStep, buckets: Buckets | None) -> tuple[str, ...]:
        """On what a user may not expect to be counted, or not to be."""
        notes = list(step.graph.meta.notes)
        if not self._optimizers:
            notes.append("the optimizer's state is not counted: pass optimizer= to count it")
            if not self._own_plans:
                warnings.warn(f"fit: {notes[-1]}", stacklevel=2)
        if buckets is not None and buckets.separate_bytes:
            notes.append(
                f"DistributedDataParallel's buckets take {format_both(buckets.size_bytes)}; with "
                "gradient_as_bucket_view=True the gradients would live in them"
            )
        return tuple(notes)

    def _whole_model(self) -> nn.Module:
        return (self._whole and self._whole()) or self._model
