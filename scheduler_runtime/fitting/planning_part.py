"""Plan a call of a module for `fit`, and build the program that runs the plan."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from graphs.capture import Capture
from graphs.costs import CostModel, default_costs, finish_measuring
from graphs.model_calls import Call, device_of, input_forms
from graphs.passes import Passes
from graphs.trace import CapturedStep
from graphs.training_step import ACCUMULATE, FRESH, OF_PASSES
from scheduler_runtime.execute import (
    ArrivedGradients,
    BoundProgram,
    OtherPrograms,
    ProgramFinder,
    RestartableStep,
    build_program,
    restart_copy_bytes,
)
from scheduler_runtime.fitting.called_part import CalledPart
from scheduler_runtime.fitting.first_steps import FirstSteps
from scheduler_runtime.fitting.gradient_outputs import gradient_outputs
from scheduler_runtime.fitting.held_optimizers import HeldOptimizers
from scheduler_runtime.fitting.held_outputs import names_of_outputs
from scheduler_runtime.fitting.in_flight import InFlight
from scheduler_runtime.fitting.known_program import known_program
from scheduler_runtime.fitting.loss_outside import LossBytes
from scheduler_runtime.fitting.loss_reserve import LossReserve
from scheduler_runtime.fitting.loss_watch import losses_not_watched
from scheduler_runtime.fitting.memory_beside_module import OtherMemory
from scheduler_runtime.fitting.options import FitError, Fitted, Options, nothing_fits
from scheduler_runtime.fitting.pending_plans import PendingPlan, PendingPlans
from scheduler_runtime.fitting.plan_history import PlanHistory
from scheduler_runtime.fitting.plan_notes import notes_on
from scheduler_runtime.fitting.pressure import Pressure
from scheduler_runtime.fitting.shared_budget import SharedBudget, where_state_may_be
from scheduler_runtime.fitting.shared_plans import SharedPlans
from scheduler_runtime.fitting.state_before_attempt import StateBeforeAttempt
from scheduler_runtime.fitting.step_to_plan import StepToPlan
from scheduler_runtime.fitting.tighter_plans import NOT_ON_RANKS, Ladder, ladder_of
from scheduler_runtime.fitting.why_another_plan import why_another
from scheduler_runtime.fitting.without_disk import without_disk
from scheduler_runtime.host_memory import keep_on_host
from scheduler_runtime.planned import Plan, PlannedPass, Ranks
from scheduler_runtime.surroundings import (
    Buckets,
    buckets_of,
    has_gradients,
    no_checkpoints,
    refuse_checkpointing,
)
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import counted, now_s, tell, telling
from solver.solving import disk_directory


class PlanningPart(CalledPart):
    """The base of `fit`'s forward: plans one kind of call after the other, and keeps the plans."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        optimizers: HeldOptimizers,
        *,
        whole: nn.Module,
        parts: Sequence[PlanningPart],
    ) -> None:
        disk = disk_directory(options.disk_budget)
        super().__init__(model, whole=whole, parts=parts, disk_directory=disk)
        self.options = options
        self._history = PlanHistory()
        self._optimizers = optimizers
        self._is_copy = False
        self._shared = SharedPlans()
        self._budget = SharedBudget(options)
        self._expected_gradients: ArrivedGradients | None = None
        self._pressure = Pressure() if options.on_pressure == "replan" else None
        self._first_steps = FirstSteps(LossReserve(options.loss_reserve))
        self._ahead = PendingPlans()
        self._in_flight = InFlight(options)
        self.attempt: StateBeforeAttempt | None = None

    @losses_not_watched()
    def _plan_call(
        self,
        call: Call,
        *,
        held_bytes: int,
        instead_of: PendingPlan | None = None,
        is_ahead: bool = False,
    ) -> PendingPlan | Ladder:
        """Trace and plan a call, and build its program.

        held_bytes: memory held by the first run of a step that runs again (0: it does not).
        instead_of: the outdated plan to replace.
        is_ahead: whether the user asked for the plan, so that there is no warning of another one.

        Returns a Ladder with on_pressure="replan". Raises FitError if nothing fits.
        """
        started_s = now_s()
        refuse_checkpointing(self._model)
        device, buckets = device_of(self._model), buckets_of(self._model)
        costs = self.options.costs or default_costs(device)
        request = self._budget.request(
            self._model,
            self._whole_model(),
            call,
            self._optimizers.existing(),
            buckets=buckets,
            costs=costs,
            optimizer_state=self._where_state_may_be(),
        )
        name = type(self._model).__name__
        with telling(f"tracing {name}...", in_lines=True) as say:
            to_plan = self._step_to_plan(call, request, buckets, costs, held_bytes)
            before = [] if is_ahead else self._history.solutions()
            reason = why_another(
                [each for each in before if not self._in_flight.is_outgrown(each)],
                self._model,
                call,
                to_plan.step,
                changed=lambda: self._programs.describe_change(self.kind(call), self._model),
            )
            if (ranks := Ranks.of(self._model)) is not None:
                if self._pressure is not None:
                    raise FitError(NOT_ON_RANKS)
                forms, traced = input_forms(call.tensors), to_plan.step.graph.graph_id
                ranks.agree({"the batch": forms, "the traced step": traced})
            say(f"planning {name} ({counted(len(to_plan.step.graph.nodes), 'op')})...")
            if self._pressure is not None:
                ladder = ladder_of(
                    to_plan,
                    self._pressure,
                    title=name,
                    device=device,
                    started_s=started_s,
                    solve=self._solve_within_limit,
                    build_program=self._build_program,
                )
                self._history.tell(reason, full_limit_s=self.options.time_limit_s)
                return ladder
            if instead_of is not None:
                to_plan = replace(to_plan, losses=to_plan.losses[:1])
            fitted, loss = self._solve(to_plan, started_s, instead_of)
        solution = fitted.solution
        if solution.schedule is None:
            raise nothing_fits(name, solution, runs_again=held_bytes > 0)
        if instead_of is None:
            self._history.tell(reason, full_limit_s=self.options.time_limit_s)
        else:
            tell(instead_of.replacement_line(fitted, loss))
        program = self._build_program(to_plan, solution)
        kind, names = self.kind_for(program, call), names_of_outputs(to_plan.step)
        if self._is_copy and not held_bytes and Ranks.of(self._model) is None:
            returned_bytes = _returned_bytes(to_plan.step)
            self._shared.add(kind, program, fitted, self.options, returned_bytes=returned_bytes)
        return PendingPlan(kind, program, fitted, loss, to_plan.outputs, costs, names)

    def _where_state_may_be(self) -> str:
        """Where the optimizer's state may be in the next plan, as in `Request`."""
        if not self._optimizers.existing():  # the training has replaced it
            return "device"
        return where_state_may_be(self.options, self._history.plans)

    def _solve_within_limit(self, to_plan: StepToPlan, started_s: float) -> Solution:
        """Plan a step within other bytes, for a ladder.

        Plans made since then may have filled the host, or moved the optimizer's state there, so the
        place of the state is looked up again."""
        to_plan = to_plan.with_state(self._where_state_may_be())
        return self._solve(to_plan, started_s)[0].solution

    def _solve(
        self, to_plan: StepToPlan, started_s: float, instead_of: PendingPlan | None = None
    ) -> tuple[Fitted, LossBytes | None]:
        """Solve for a step; keeps the answer in the history if it is a plan.

        Returns it with the loss that it counts."""
        known = self._history.known(self._first_steps.outdated) if instead_of is None else []
        found, loss = to_plan.plan(known)
        finish_measuring(to_plan.costs)  # after planning, which may measure ops of other variants
        solution, ranks = found.solution, Ranks.of(self._model)
        if ranks is not None:
            solution = ranks.with_plan_of_first(solution)
        notes = (*(() if loss is None else (loss.note,)), *to_plan.notes)
        fitted = Fitted(solution, notes, found.reused, took_s=now_s() - started_s)
        if solution.schedule is not None:
            self._history.add(fitted, instead_of=None if instead_of is None else instead_of.fitted)
        return fitted, loss

    def _trace_step(
        self, call: Call, request: Request, buckets: Buckets | None, costs: CostModel
    ) -> CapturedStep:
        """Trace the module's own step, without rewrites."""
        gradients = ACCUMULATE if has_gradients(self._model, buckets) else FRESH
        with no_checkpoints():
            step = self.trace_own_forward(
                call,
                choose=functools.partial(
                    gradient_outputs,
                    reached=None
                    if self._expected_gradients is None
                    else self._expected_gradients.outputs,
                    loss_outputs=self.options.loss_outputs,
                ),
                gradients=OF_PASSES if self._in_flight.n > 1 else gradients,
                costs=costs,
                rewrites=(),
                gradient_layouts={}
                if self._expected_gradients is None
                else dict(self._expected_gradients.layouts),
                known=known_program(self._programs, self.kind(call), self._model, call),
            )
            return self.rehearsed(step, call)

    def _build_program(
        self,
        to_plan: StepToPlan,
        solution: Solution,
        *,
        tighter: ProgramFinder | None = None,
    ) -> BoundProgram:
        """Build the program of a solution's schedule.

        tighter: finds another program if memory runs out.
        """
        assert solution.schedule is not None
        if n_parameters := Plan.of(solution).state_buckets:
            (optimizer,) = self._optimizers.existing()
            keep_on_host(optimizer, n_parameters, owner=self)
        step = to_plan.step.with_rewrites(solution.graph.meta.rewrites)
        program = BoundProgram(
            step,
            build_program(
                step,
                solution.schedule,
                places=solution.request.places,
                pools=self._pools,
            ),
            others=OtherPrograms(
                functools.partial(
                    self._program_for_gradients,
                    planned=step.captured,
                    returned_bytes=_returned_bytes(step),
                ),
                tighter,
                self._on_begin,
                without_disk(
                    self._model,
                    to_plan,
                    solution,
                    solve=self._solve_for_one_step,
                    build_program=self._build_program,
                ),
            ),
        )
        self._in_flight.passes.plan(program.program, PlannedPass.of_solution(solution))
        return program

    def _program_of_other_copy(self, call: Call) -> BoundProgram | None:
        """The program that another copy of the same module has for this call, if there is one."""
        shared = self._shared.find(self.kind(call), self._model, call) if self._is_copy else None
        if shared is None:
            return None
        for_gradients = functools.partial(
            self._program_for_gradients,
            planned=shared.program.captured,
            returned_bytes=shared.returned_bytes,
        )
        program = shared.program.with_others(
            OtherPrograms(for_gradients, None, self._on_begin, None)
        )
        self._in_flight.passes.plan(program.program, shared.planned_pass)
        self._history.add(shared.fitted, instead_of=None)
        return program

    def _solve_for_one_step(self, to_plan: StepToPlan) -> Solution:
        """Solve for a step that runs again without the disk; later calls do not use the plan."""
        to_plan = to_plan.with_state(self._where_state_may_be())
        fitted, _ = self._solve(to_plan, now_s())
        if fitted.solution.schedule is not None:
            self._history.single_step_plans.append(fitted)
        return fitted.solution

    @abstractmethod
    def _program_for_gradients(
        self,
        call: Call,
        reached: ArrivedGradients,
        held_bytes: int,
        *,
        planned: Capture,
        returned_bytes: int,
    ) -> BoundProgram: ...

    def _on_begin(self, step: RestartableStep) -> None:
        if self.attempt is not None:
            self.attempt.note_begun(step)

    def _step_to_plan(
        self,
        call: Call,
        request: Request,
        buckets: Buckets | None,
        costs: CostModel,
        held_bytes: int,
    ) -> StepToPlan:
        """Trace a call, and collect what its plan has to count.

        held_bytes: memory held by the first run of a step that runs again (0: it does not).
        """
        device, whole = device_of(self._model), self._whole_model()
        step = self._trace_step(call, request, buckets, costs)
        always = self._pressure is not None
        if not held_bytes:  # in a step that runs again, the first run's copies are in held_bytes
            held_bytes = restart_copy_bytes(step.captured, device, always=always)
        captured = step.captured
        outputs = tuple(captured.outputs[i].meta["val"] for i in captured.gradient_outputs)
        returns_loss = len(outputs) == 1 and outputs[0].numel() == 1
        losses: tuple[LossBytes, ...] = ()  # the model returns it
        if not returns_loss or self.options.loss_outputs is not None:
            losses = self._first_steps.loss.choices(
                outputs,
                device,
                is_watched=not always,
                n_passes=self._in_flight.n,
                available_bytes=request.available_bytes,
            )
        optimizers = self._optimizers.existing()
        other_memory = OtherMemory.of(self._model, whole, optimizers, costs, buckets=buckets)
        return StepToPlan(
            step,
            other_memory,
            losses,
            outputs,
            request,
            notes=notes_on(step, buckets, optimizers, is_first=not self._history.plans),
            kept_bytes=held_bytes,
            keeps_gradients=always,
            passes=Passes(self._in_flight.n, accumulate=has_gradients(self._model, buckets)),
            others_bytes=self._in_flight.others_bytes,
            costs=costs,
        )


def _returned_bytes(step: CapturedStep) -> int:
    """Bytes of the outputs that the module returns."""
    part = step.graph.module_part()
    return sum(part.tensor_by_name[name].size_bytes for name in part.returned)
