"""Apply a plan to a module: the same object, its forward replaced.

    apply(model, solution)      # train as before
    remove(model)               # restores the module's own forward

At the first forward pass in training mode, the module is traced with the real batch. If the graph
is the planned one, a program is generated for the schedule. Otherwise the plan's request is solved
again for this call if only values differ that forward reads (a padding mask), if the batch is only
smaller (the last one of an epoch), or with `on_mismatch="replan"`; if not, an error says what
differs. In evaluation mode and without gradients, the module's own forward runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphs.capture import FailsOnBatchError
from graphs.costs import finish_measuring, from_description
from graphs.graph import warn
from graphs.host_state import with_loads
from graphs.model_calls import Call, LayoutForShapes, TraceError, device_of
from graphs.pipeline import pipeline_of
from graphs.trace import CapturedStep
from graphs.training_step import GivenOptimizer, read_optimizer
from scheduler_runtime.by_submodule import SubmoduleSolution, put_checkpoints
from scheduler_runtime.execute import (
    BoundProgram,
    CudaGraphError,
    StepProgram,
    build_program,
    has_checkpoints,
    module_schedule,
    remove_torch_checkpoint,
)
from scheduler_runtime.execute import cuda_graph as cuda_graphs
from scheduler_runtime.host_memory import bring_back, hosted_optimizer, hosted_parameters
from scheduler_runtime.planned import (
    AnyPlan,
    Difference,
    PassesInFlight,
    Plan,
    PlanMismatchError,
    PlannedForward,
    PlannedPass,
    check_arguments,
    check_module,
    check_order,
    difference,
    difference_of_bits,
    n_planned_passes,
    plan_summary,
    refuse_second,
    replan,
    warn_of_another_plan,
    warn_of_existing,
)
from solver.methods import KnownPlan
from solver.schedule import Free, Spill, simulate
from solver.sizes_deadlines_progress import format_both, format_time, names_checked, now_s, tell

ON_MISMATCH = ("smaller", "replan", "error")


@names_checked
def apply(
    model: nn.Module,
    plan: AnyPlan | Sequence[AnyPlan],
    *,
    on_mismatch: str = "smaller",
    cuda_graph: bool = False,
    disk_directory: str | Path | None = None,
    optimizer: GivenOptimizer | None = None,
) -> nn.Module:
    """Replace the module's forward by the planned step; returns the same module.

    plan: a Solution, or a schedule file made in another process; or several, for batches of several
        shapes. A plan of `fallback.plan_chain` puts stock checkpointing into the submodules.
    on_mismatch: what to do at a forward pass that no plan fits. "smaller": if only sizes of tensors
        differ and none is larger (a short last batch), plan for the call within the budget of the
        given plan, keep that plan, too, and warn; otherwise, and for a stage of a pipeline, raise
        PlanMismatchError. "replan": plan for every such call. "error": always raise. A call that
        differs only in values that forward reads (is the padding mask all ones?) is planned
        whichever of these is given.
    cuda_graph: record the planned step as CUDA graphs at its first call and replay them. Shapes and
        addresses are then fixed; `scheduler_runtime.execute.cuda_graph` lists all conditions.
    disk_directory: where plans that copy tensors to a disk make their file (default: the directory
        they were made for). Nothing is left there after the process has ended, however it ends.
    optimizer: the one that trains the model, for a plan that has its state on the host: from now on
        its state is on the device only while it steps. Other plans ignore it.

    Raises FormatError (the file), CudaGraphError, ValueError (a plan without a schedule; plans of
    different steps; a module with a plan; an optimizer that is missing or not the planned one),
    TypeError (not a module and a plan).
    """
    if on_mismatch not in ON_MISMATCH:
        raise ValueError(f"on_mismatch is {on_mismatch!r}; one of {', '.join(ON_MISMATCH)}")
    check_order(model, plan)
    refuse_second(model)
    if isinstance(plan, SubmoduleSolution):
        return put_checkpoints(model, plan)
    if cuda_graph:
        cuda_graphs.check_model(model)
    plans: Sequence[AnyPlan] = [plan] if isinstance(plan, AnyPlan) else plan
    model.forward = AppliedForward(
        model,
        [Plan.of(each) for each in plans],
        on_mismatch=on_mismatch,
        cuda_graph=cuda_graph,
        disk_directory=disk_directory,
        optimizer=None if optimizer is None else read_optimizer(optimizer, model),
    )
    return model


def remove(model: nn.Module) -> nn.Module:
    """Undo `apply`, `fit`, `compile` or an export, and return the module.

    Raises ValueError if it has no plan."""
    check_module(model, "remove(model)")
    if has_checkpoints(model):
        return remove_torch_checkpoint(model)
    forward = model.__dict__.get("forward")
    if not isinstance(forward, PlannedForward):
        raise ValueError("no plan is applied to this module")
    forward.restore()
    return model


class AppliedForward(PlannedForward):
    """Runs the given plans; `on_mismatch` says which other calls are planned."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        *,
        on_mismatch: str,
        cuda_graph: bool,
        disk_directory: str | Path | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        if not plans:
            raise ValueError("there is no plan to apply: the list is empty")
        self._host_parameters = hosted_parameters(model, plans, cuda_graph=cuda_graph)
        self._optimizer = hosted_optimizer(plans, optimizer, self._host_parameters, owner=self)
        # plans may have other shapes, but must differentiate the same outputs in the same way
        for field in ("train", "gradients", "gradient_outputs", "passes"):
            values = [plan.environment.get(field) for plan in plans]
            if any(value != values[0] for value in values):
                raise ValueError(f"the plans are for different steps: {field} is {values}")
        of_plans = (plan.request.places for plan in plans)
        planned = (each.disk_directory for each in of_plans if each is not None)
        directory = disk_directory or next(filter(None, planned), None)
        if directory is None and any(Spill in map(type, plan.schedule.ops) for plan in plans):
            raise ValueError(
                "the plan copies to a disk: name a directory there, "
                'apply(model, plan, disk_directory="/scratch")'
            )
        super().__init__(model, disk_directory=directory)
        self.plans = tuple(plans)
        self._known_plans = [plan.known for plan in plans]
        self._kept = [plan.kept for plan in plans if plan.kept is not None]
        self._n_plans = len(plans)
        self._given_remedies: set[str] = set()
        self._has_warned_of_gradients = False
        self._trained: list[weakref.ref[nn.Parameter]] = []
        self._passes, self._has_warned_of_passes = PassesInFlight(), False
        self.on_mismatch = on_mismatch
        self._recordings = cuda_graphs.Recordings() if cuda_graph else None

    def __getstate__(self) -> dict[str, Any]:
        """The optimizer belongs to the original, not to a copy of the module."""
        recordings = None if self._recordings is None else cuda_graphs.Recordings()
        own: dict[str, Any] = {"_recordings": recordings, "_kept": [], "_optimizer": None}
        own["_trained"] = []
        own["_passes"] = PassesInFlight()
        return {**super().__getstate__(), **own}

    def restore(self) -> None:
        if self._host_parameters is not None:  # first: if they do not fit, the plan stays in place
            self._host_parameters.bring_back()
        if self._optimizer is not None:
            bring_back(self._optimizer, owner=self)
        if self._host_parameters is not None:
            self._host_parameters.close(self._model)
            self._host_parameters = None
        super().restore()

    def begin(self) -> None:
        if not self._has_warned_of_gradients:
            # looked up once: the device would wait for a walk through a deep model in every step
            found = (parameter() for parameter in self._trained)
            trained = [parameter for parameter in found if parameter is not None]
            if not trained or len(trained) < len(self._trained):
                trained = [p for p in self._model.parameters() if p.requires_grad]
                self._trained = [weakref.ref(parameter) for parameter in trained]
            self._has_warned_of_gradients = warn_of_existing(self._model, trained, self.plans)
        if self._optimizer is None and any(plan.state_buckets for plan in self.plans):
            raise RuntimeError(
                "this model is a copy of one whose plan has the optimizer's state on the host, and "
                "the optimizer belongs to the original: remove(model), then apply(model, plan, "
                "optimizer=optimizer) with the one that trains the copy"
            )
        if self._host_parameters is not None:
            self._host_parameters.move_to_host()

    def unplanned(self, *args: Any, **kwargs: Any) -> Any:
        if self._host_parameters is not None:
            self._host_parameters.bring_back()
        return super().unplanned(*args, **kwargs)

    def run_for_export(self, *args: Any, **kwargs: Any) -> Any:
        if self._host_parameters is not None:
            raise RuntimeError(
                "the plan keeps parameters in host memory, where a tool that exports the model "
                "does not find them: checkpoint_solver.remove(model) before exporting"
            )
        return super().run_for_export(*args, **kwargs)

    @contextlib.contextmanager
    def values_on_device(self) -> Iterator[None]:
        if self._host_parameters is None:
            yield
            return
        with self._host_parameters.on_device():
            yield
        self._host_parameters.move_to_host()

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="the module has a plan, which runs operator by operator; "
        "checkpoint_solver.remove(model) undoes it"
    )
    def run(self, *args: Any, **kwargs: Any) -> Any:
        output = super().run(*args, **kwargs)
        if not self._has_warned_of_passes and self._passes.add(output):
            self._warn_of_passes()
        return output

    def _warn_of_passes(self) -> None:
        """Warn if the passes that wait for a backward pass may exceed the budget together."""
        above_bytes, n = self._passes.above_bytes(), len(self._passes.waiting)
        if not above_bytes:
            return
        self._has_warned_of_passes = True
        remedy = f"for {n} passes of the largest batch: solve(..., passes={n}) or --passes {n}"
        if (place := pipeline_of(self.plan.environment)) is not None:
            remedy = f"for the schedule that runs; this plan is of {place.words}"
        warn(
            f"apply: {n} forward passes of {type(self._model).__name__} wait for a backward pass "
            f"together, but the plan is for {n_planned_passes(self.plan.environment)}: this step "
            f"may take up to {format_both(above_bytes)} more than the budget. Plan {remedy}"
        )

    @property
    def plan(self) -> Plan:
        """The first plan, whose budget and options new plans share."""
        return self.plans[0]

    def covers(self) -> bool:
        """Training always, evaluation only if it was planned; another mode is a mismatch."""
        return self._model.training or not self.plan.environment.get("train", True)

    def program_for(self, call: Call) -> StepProgram:
        model = self._model
        self._trained = []  # look again: other parameters may be trained now
        check_arguments(model, call, forward=self.own_forward)
        started_s = now_s()
        try:
            step = self._trace(call)
        except FailsOnBatchError as error:
            reason = difference(self.plan, call, model)
            if reason is not None and error.__cause__ is not None:
                error.__cause__.add_note(f"unlike the planned call: {reason}")
            raise
        except TraceError:
            # an unplanned call often cannot be traced at all: say what differs instead
            reason = difference(self.plan, call, model)
            if reason is None or self.on_mismatch == "replan":
                raise
            raise self._mismatch(reason) from None
        steps = [_as_planned(step, plan) for plan in self.plans]
        parts = [each.graph.module_part() for each in steps]
        found = [
            difference(plan, call, model, part) or difference_of_bits(each)
            for plan, part, each in zip(self.plans, parts, steps, strict=True)
        ]
        if None in found:
            fitting = found.index(None)
            plan, step, part = self.plans[fitting], steps[fitting], parts[fitting]
            schedule = plan.schedule
            # A file may have been edited, so check its peak. In the module's part alone, gradients
            # of outputs are live from the start, and outputs that the caller drops (in plans of
            # `fit`) to the end; without these bytes, its peak is at most that of the whole step.
            tangent_bytes = sum(t.size_bytes for t in part.resident if t.kind == "tangent")
            freed = {op.tensor for op in plan.schedule.ops if isinstance(op, Free)}
            dropped = freed.intersection(part.returned)
            dropped_bytes = sum(part.tensor_by_name[name].size_bytes for name in dropped)
            places = plan.request.places
            part_simulation = simulate(part, module_schedule(schedule, part), places=places)
            peak_bytes = part_simulation.peak_bytes - tangent_bytes - dropped_bytes
            if peak_bytes > plan.request.available_bytes:
                raise PlanMismatchError(
                    f"the plan takes at least {peak_bytes} bytes, and its budget leaves "
                    f"{plan.request.available_bytes}: the schedule file was edited; plan again"
                )
            planned = PlannedPass.of(
                part,
                n=n_planned_passes(plan.environment),
                saved_bytes=part_simulation.saved_bytes,
                peak_bytes=plan.peak_bytes,
                available_bytes=plan.request.available_bytes,
            )
            took = format_time(now_s() - started_s)
            tell(f"{type(model).__name__}: the traced step matches the plan ({took})")
        else:
            differences = [each for each in found if each is not None]
            reason = max(differences, key=lambda each: (each.of_values, each.is_smaller))
            plan = self.plans[differences.index(reason)]
            if not self.may_replan(reason):
                raise self._mismatch(reason)
            costs = from_description(plan.environment.get("costs", {}), device=device_of(model))
            step = self.rehearsed(step.with_costs(costs), call)
            step, new = replan(step, plan, str(reason), known=self._known_plans)
            finish_measuring(costs)  # after replan, which may measure operators of other variants
            assert new.solution.schedule is not None
            if not new.reused:
                self._known_plans.append(KnownPlan.of(new.solution))
            self._n_plans += 1
            line = plan_summary(new.solution, is_reused=new.reused, took_s=now_s() - started_s)
            warn_of_another_plan(line, reason, n_plans=self._n_plans, given=self._given_remedies)
            schedule = new.solution.schedule
            planned = PlannedPass.of_solution(new.solution)
        program = BoundProgram(
            step, build_program(step, schedule, places=plan.request.places, pools=self._pools)
        )
        self._passes.plan(program.program, planned)
        if self._recordings is None:
            return program
        return cuda_graphs.Recorded(program, model, call, self._recordings)

    def may_replan(self, reason: Difference) -> bool:
        """Whether to plan for a call that differs so, instead of raising PlanMismatchError."""
        if self._host_parameters is not None:
            return False
        if reason.of_values or self.on_mismatch == "replan":
            return True
        # The stages of a pipeline exchange tensors of one shape.
        in_pipeline = pipeline_of(self.plan.environment) is not None
        return self.on_mismatch == "smaller" and reason.is_smaller and not in_pipeline

    def _mismatch(self, reason: Difference) -> PlanMismatchError:
        remedy = 'plan again, or apply(..., on_mismatch="replan")'
        if (place := pipeline_of(self.plan.environment)) is not None:
            remedy = (
                f"the plan is of {place.words}: is this module another stage? Apply the plan of "
                f"its own stage, else {remedy}"
            )
        title = type(self._model).__name__
        return PlanMismatchError(
            f"the plan does not fit this call of {title}: {reason}; {remedy}",
            difference=str(reason),
        )

    def _trace(self, call: Call) -> CapturedStep:
        environment = self.plan.environment
        # Kept programs are only tried at the first call; later calls differ from the planned one.
        kept, self._kept = self._kept, []
        return self.trace_own_forward(
            call,
            choose=lambda _output: tuple(environment["gradient_outputs"]),
            gradient_layouts=LayoutForShapes.in_environment(environment),
            gradients=environment.get("gradients", "fresh"),
            costs=None,
            rewrites=self.plan.rewrites,
            opaque=environment.get("opaque", ()),
            kept=kept,
        )


def _as_planned(step: CapturedStep, plan: Plan) -> CapturedStep:
    """The step with the plan's rewrites, and loads of the parameters that it has on the host."""
    step = step.with_rewrites(plan.rewrites)
    tensors = plan.host_parameters.values()
    if not tensors or not set(tensors) <= set(step.graph.tensor_by_name):
        return step
    graph = with_loads(step.graph, tensors, in_s=lambda _size_bytes: 0.0)
    return dataclasses.replace(step, graph=graph)


__all__ = ["CudaGraphError", "PlanMismatchError", "TraceError", "apply", "remove"]
