"""Put a plan into a module: the same object, its forward replaced.

    apply(model, solution)      # train as before
    remove(model)               # as it was

At the first forward pass in training mode the module is traced again with the real batch. If the
graph is the one that was planned, its schedule becomes code; if not, the error says what differs,
or, with `on_mismatch="replan"`, a new plan is made from the request that the plan carries. In
evaluation mode and without gradients the module's own forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphs.calls import Call, TraceError, device_of
from graphs.costs import CostModel, finish_measuring, from_description
from graphs.graph import Graph
from graphs.trace import CapturedStep
from scheduler_runtime.by_submodule import SubmoduleSolution, put
from scheduler_runtime.execute import build_program, has_checkpoints, remove_torch_checkpoint
from scheduler_runtime.planned import (
    AnyPlan,
    BoundProgram,
    CudaGraphError,
    ForwardReplacement,
    Plan,
    Recorded,
    Recordings,
    StepProgram,
    check_arguments,
    check_model,
    check_module,
    check_order,
    environment_difference,
    forms_difference,
    graph_difference,
    module_schedule,
    refuse_second,
    replan,
)
from solver.schedule import Schedule, simulate


class PlanMismatchError(ValueError):
    """The module, its batch or its environment is not what was planned; says what differs."""


def apply(
    model: nn.Module,
    plan: AnyPlan | Sequence[AnyPlan],
    *,
    on_mismatch: str = "error",
    cuda_graph: bool = False,
) -> nn.Module:
    """Replace the module's forward by the planned step; returns the same module.

    plan: a Solution, or a schedule file made in another process; or several, for batches of
        several shapes. One of `fallback.plan_chain` puts stock checkpointing into its submodules.
    on_mismatch: "error": PlanMismatchError at the forward pass that no plan fits; "replan": plan
        anew for it, within the budget of the first plan, and keep that plan beside the others.
    cuda_graph: record the planned step as CUDA graphs at its first call and replay them. Shapes and
        addresses are then fixed; see `scheduler_runtime.planned.cuda_graph` for what is refused.

    Raises FormatError (the file), CudaGraphError, ValueError (a plan without schedule; plans of
    different steps; applied twice), TypeError (something else than a module and a plan).
    """
    if on_mismatch not in ("error", "replan"):
        raise ValueError(f"on_mismatch is {on_mismatch!r}; 'error' or 'replan'")
    check_order(model, plan)
    refuse_second(model)
    if isinstance(plan, SubmoduleSolution):
        return put(model, plan)
    if cuda_graph:
        check_model(model)
    plans: Sequence[AnyPlan] = [plan] if isinstance(plan, AnyPlan) else plan
    model.forward = PlannedForward(
        model,
        [Plan.of(each) for each in plans],
        on_mismatch=on_mismatch,
        cuda_graph=cuda_graph,
    )
    return model


def remove(model: nn.Module) -> nn.Module:
    """The module's own forward again, after `apply`, `fit`, `compile` or an export; returns it."""
    check_module(model, "remove(model)")
    if has_checkpoints(model):
        return remove_torch_checkpoint(model)
    planned = model.__dict__.get("forward")
    if not isinstance(planned, ForwardReplacement):
        raise ValueError("no plan is applied to this module")
    del model.forward
    if planned.instance_forward is not None:
        model.forward = planned.instance_forward
    return model


class PlannedForward(ForwardReplacement):
    """Runs the plans that it was given, and those that it made for other calls."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        *,
        on_mismatch: str,
        cuda_graph: bool = False,
    ) -> None:
        _refuse_different_steps(plans)
        super().__init__(model)
        self.plans = tuple(plans)
        self.on_mismatch = on_mismatch
        self.cuda_graph = cuda_graph
        self._recordings = Recordings()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_recordings": Recordings()}

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="the module has a plan, which runs operator by operator; "
        "scheduler_runtime.remove(model) undoes it"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The first: what is planned anew takes its budget and its options."""
        return self.plans[0]

    def covers(self) -> bool:
        """Evaluation only where it was planned; training always: another mode is a mismatch."""
        return self._model.training or not self.plan.environment.get("train", True)

    def program_for(self, call: Call) -> StepProgram:
        check_arguments(self._model, call, forward=self._own_forward)
        try:
            step = self._trace(call)
        except TraceError:
            # What nobody planned for often cannot run at all: then that is the reason.
            reason = self._environment_difference(call, device=device_of(self._model).type)
            if not reason and self.plan.graph is not None:
                reason = forms_difference(self.plan.graph, call, self._model)
            if not reason or self.on_mismatch != "error":
                raise
            raise self._mismatch(reason) from None
        part = step.graph.module_part()
        plan = next((p for p in self.plans if p.module_graph_id == part.graph_id), None)
        if plan is None:
            reason = self._difference(part, call)
            if self.on_mismatch == "error":
                raise self._mismatch(reason)
            described = self.plan.environment.get("costs", {})
            costs = from_description(described, device=device_of(self._model))
            step = self._trace(call, costs=costs)
            finish_measuring(costs)
            schedule = module_schedule(
                replan(step.graph, self.plan, reason), step.graph.module_part()
            )
        else:
            schedule = module_schedule(plan.schedule, part)
            _judge(part, schedule, available_bytes=plan.request.available_bytes)
        compiled = BoundProgram(step, build_program(step, schedule))
        if not self.cuda_graph:
            return compiled
        return Recorded(compiled, self._model, call, self._recordings)

    def _mismatch(self, reason: str) -> PlanMismatchError:
        return PlanMismatchError(
            f"the plan does not fit this call of {type(self._model).__name__}: {reason}; "
            'plan again, or apply(..., on_mismatch="replan")'
        )

    def _trace(self, call: Call, *, costs: CostModel | None = None) -> CapturedStep:
        gradient_outputs = tuple(self.plan.environment["gradient_outputs"])
        return self.traced(
            call,
            choose=lambda _output: gradient_outputs,
            gradients=self.plan.environment.get("gradients", "fresh"),
            costs=costs,
        )

    def _difference(self, graph: Graph, call: Call) -> str:
        """The first thing in which the call differs from the plan."""
        planned = self.plan.graph
        words = self._environment_difference(call, device=graph.meta.environment["device"])
        if words:
            return words
        if planned is None:
            return "the traced operators are not those of the plan"
        return forms_difference(planned, call, self._model) or graph_difference(
            planned.module_part(), graph
        )

    def _environment_difference(self, call: Call, *, device: str) -> str:
        return environment_difference(self.plan.environment, call, self._model, device=device)


def _judge(part: Graph, schedule: Schedule, *, available_bytes: int) -> None:
    """A file may say anything: the judge has the last word, on the budget too.

    Gradients of outputs count as there from the start in the module's part, so their bytes are
    taken off: what is left is in no case more than the whole step takes.
    """
    tangent_bytes = sum(t.size_bytes for t in part.resident if t.kind == "tangent")
    least_bytes = simulate(part, schedule).peak_bytes - tangent_bytes
    if least_bytes > available_bytes:
        raise PlanMismatchError(
            f"the plan takes at least {least_bytes} bytes, and its budget leaves "
            f"{available_bytes}: the schedule file was changed by hand; plan again"
        )


def _refuse_different_steps(plans: Sequence[Plan]) -> None:
    """Plans may differ in shapes; what is differentiated, and how, must be the same."""
    if not plans:
        raise ValueError("there is no plan to apply: the list is empty")
    for field in ("train", "gradients", "gradient_outputs"):
        values = [plan.environment.get(field) for plan in plans]
        if any(value != values[0] for value in values):
            raise ValueError(f"the plans are for different steps: {field} is {values}")


__all__ = ["CudaGraphError", "PlanMismatchError", "TraceError", "apply", "remove"]
