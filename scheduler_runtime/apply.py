"""Put a plan into a module: the same object, its forward replaced.

    apply(model, solution)      # train as before
    remove(model)               # as it was

At the first forward pass in training mode the module is traced again with the real batch. If the
graph is the one that was planned, its schedule becomes code; if not, the error says what differs,
or, with `on_mismatch="replan"`, a new plan is made from the request that the plan carries. In
evaluation mode and without gradients the module's own forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphs.call import Call, TraceError, environment_of
from graphs.costs import CostModel, from_description
from graphs.files import FormatError
from graphs.graph import Graph
from graphs.trace import StepTrace, trace_module
from scheduler_runtime.function import run_step
from scheduler_runtime.program import Program, compile_schedule
from scheduler_runtime.replan import replan
from solver.schedule import Compute, Schedule
from solver.simulate import simulate
from solver.solution import Request, SavedSchedule, Solution


class PlanMismatchError(ValueError):
    """The module, its batch or its environment is not what was planned; says what differs."""


@dataclass(frozen=True)
class Plan:
    """What `apply` needs of a Solution or a schedule file."""

    schedule: Schedule
    request: Request
    environment: Mapping[str, Any]
    module_graph_id: str
    graph: Graph | None

    @classmethod
    def of(cls, plan: Solution | SavedSchedule | str | Path) -> Plan:
        if isinstance(plan, str | Path):
            if not Path(plan).is_file():
                raise FileNotFoundError(
                    f"there is no schedule file {str(plan)!r}; `solve -o schedule.json model.py` "
                    "and Solution.save write one"
                )
            plan = SavedSchedule.load(plan)
        if plan.schedule is None:
            raise ValueError(f"the solution has no schedule to apply: its status is {plan.status}")
        if isinstance(plan, Solution):
            part = plan.graph.module_part()
            graph: Graph | None = part
            environment, module_graph_id = plan.environment, part.graph_id
        else:
            graph, environment = None, plan.environment
            module_graph_id = environment.get("module_graph_id", plan.schedule.graph_id)
        chosen = environment.get("gradient_outputs", [])
        if not isinstance(chosen, list) or not all(isinstance(index, int) for index in chosen):
            raise FormatError(
                f"environment: field 'gradient_outputs' is {chosen!r:.60}; expected a list of "
                "integers"
            )
        if not chosen:
            raise ValueError(
                "the plan was made for a graph file that no module was traced into; apply needs a "
                "plan from solve(model, batch, ...) or `solve model.py`"
            )
        return cls(plan.schedule, plan.request, environment, module_graph_id, graph)


def apply(
    model: nn.Module,
    plan: Solution | SavedSchedule | str | Path,
    *,
    on_mismatch: str = "error",
) -> nn.Module:
    """Replace the module's forward by the planned step; returns the same module.

    plan: a Solution, or a schedule file made in another process.
    on_mismatch: "error": PlanMismatchError at the forward pass that differs from the plan;
        "replan": plan anew for it, within the same budget, and keep that plan beside the first.

    Raises FormatError (the file), ValueError (a plan without schedule; applied twice).
    """
    if on_mismatch not in ("error", "replan"):
        raise ValueError(f"on_mismatch is {on_mismatch!r}; 'error' or 'replan'")
    if isinstance(model.__dict__.get("forward"), PlannedForward):
        raise ValueError("a plan is applied to this module already; remove(model) it first")
    model.forward = PlannedForward(model, Plan.of(plan), on_mismatch=on_mismatch)
    return model


def remove(model: nn.Module) -> nn.Module:
    """Undo `apply`: the module runs its own forward again. Returns the same module."""
    planned = model.__dict__.get("forward")
    if not isinstance(planned, PlannedForward):
        raise ValueError("no plan is applied to this module")
    del model.forward
    if planned.instance_forward is not None:
        model.forward = planned.instance_forward
    return model


class PlannedForward:
    """Stands in for `model.forward`; keeps one program for each kind of call."""

    def __init__(self, model: nn.Module, plan: Plan, *, on_mismatch: str) -> None:
        self.instance_forward = model.__dict__.get("forward")
        self.plan = plan
        self.on_mismatch = on_mismatch
        self._model = model
        self._tracing = False
        self._programs: dict[Any, _Compiled] = {}
        functools.update_wrapper(self, self._own_forward, updated=())

    @property
    def _own_forward(self) -> Any:
        """The forward that the module had before."""
        if self.instance_forward is not None:
            return self.instance_forward
        return functools.partial(type(self._model).forward, self._model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model
        planned_mode = bool(self.plan.environment.get("train", True))
        if self._tracing or not torch.is_grad_enabled() or model.training != planned_mode:
            return self._own_forward(*args, **kwargs)
        call = Call.of(args, kwargs)
        key = self._key(call)
        compiled = self._programs.get(key)
        if compiled is None:
            compiled = self._compile(call)
            self._programs[key] = compiled
        return compiled.run(model, call)

    def __getstate__(self) -> dict[str, Any]:
        """Programs are not copied or pickled: they are made again at the next forward pass."""
        return {**self.__dict__, "_programs": {}}

    def _key(self, call: Call) -> Any:
        """Everything that the traced graph depends on and that may change between calls."""
        model = self._model
        device = next((p.device.type for p in model.parameters()), "cpu")
        return (
            tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in call.tensors),
            tuple(repr(item) for item in call.rest),
            call.spec,
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            tuple((p.dtype, p.device, p.requires_grad) for p in model.parameters()),
            tuple(_settings(module) for module in model.modules()),
        )

    def _compile(self, call: Call) -> _Compiled:
        step = self._trace(call)
        schedule = self.plan.schedule
        part = step.graph.module_part()
        if part.graph_id != self.plan.module_graph_id:
            reason = self._difference(part, call)
            if self.on_mismatch == "error":
                raise PlanMismatchError(
                    f"the plan does not fit this call of {type(self._model).__name__}: {reason}; "
                    'plan again, or apply(..., on_mismatch="replan")'
                )
            step = self._trace(call, costs=from_description(self.plan.environment.get("costs", {})))
            schedule = replan(step.graph, self.plan.request, self.plan.environment, reason)
            part = step.graph.module_part()
        schedule = _module_schedule(schedule, part)
        simulate(part, schedule)  # a file may say anything: the judge has the last word
        return _Compiled(step, compile_schedule(step, schedule))

    def _trace(self, call: Call, *, costs: CostModel | None = None) -> StepTrace:
        gradient_outputs = tuple(self.plan.environment["gradient_outputs"])
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        self._tracing = True
        try:
            return trace_module(
                self._model,
                call,
                device=device,
                choose=lambda _output: gradient_outputs,
                gradients=self.plan.environment.get("gradients", "fresh"),
                costs=costs,
            )
        finally:
            self._tracing = False

    def _difference(self, graph: Graph, call: Call) -> str:
        """The first field in which the call differs from the plan."""
        planned = self.plan.environment
        here = {**environment_of(call, self._model), "device": graph.meta["environment"]["device"]}
        for field in ("device", "shapes", "dtypes", "train", "autocast", "torch"):
            if field in planned and planned[field] != here[field]:
                return f"{field} is {here[field]}, planned was {planned[field]}"
        if self.plan.graph is None:
            return "the traced operators are not those of the plan"
        for new, old in zip(graph.nodes, self.plan.graph.nodes, strict=False):
            if (new.name, new.op, new.inputs) != (old.name, old.op, old.inputs):
                return f"operator {new.name} ({new.op}) stands where {old.name} ({old.op}) did"
        for tensor in graph.tensors:
            old_tensor = self.plan.graph.tensor_by_name.get(tensor.name)
            if old_tensor is None or old_tensor.size_bytes != tensor.size_bytes:
                before = "not there" if old_tensor is None else f"{old_tensor.size_bytes} bytes"
                return f"tensor {tensor.name} has {tensor.size_bytes} bytes, planned: {before}"
        return f"{len(graph.nodes)} operators, planned were {len(self.plan.graph.nodes)}"


_PLAIN = (bool, int, float, str)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What may change the program from one call to the next: plain attributes and hooks."""
    attributes = vars(module)
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return (
        *(value for value in attributes.values() if isinstance(value, _PLAIN)),
        *map(len, hooks),
    )


def _module_schedule(schedule: Schedule, part: Graph) -> Schedule:
    """The schedule without what the caller runs: the loss outside, the optimizer."""
    ops = tuple(
        op
        for op in schedule.ops
        if (op.node in part.node_by_name if isinstance(op, Compute) else op.tensor in part.producer)
    )
    return Schedule(ops=ops, graph_id=part.graph_id)


class _Compiled:
    """A program and where its tensors come from in the module and the call."""

    def __init__(self, step: StepTrace, program: Program) -> None:
        self.program = program
        self._output_spec = step.captured.output_spec
        self._parameters: list[tuple[fx.Node, str]] = []
        self._buffers: list[tuple[fx.Node, str]] = []
        self._inputs: list[tuple[fx.Node, int]] = []
        for node, source in step.captured.sources.items():
            if source.kind == "parameter":
                self._parameters.append((node, source.name))
            elif source.kind == "buffer":
                self._buffers.append((node, source.name))
            elif source.kind == "input":
                self._inputs.append((node, source.index))

    def run(self, model: nn.Module, call: Call) -> Any:
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        tensors: dict[fx.Node, torch.Tensor]
        tensors = {node: parameters[name] for node, name in self._parameters}
        tensors |= {node: buffers[name] for node, name in self._buffers}
        tensors |= {node: call.tensors[index] for node, index in self._inputs}
        made = iter(run_step(self.program, tensors))
        flat = [self._output(item, tensors, made) for item in self.program.outputs]
        return pytree.tree_unflatten(flat, self._output_spec)

    def _output(self, item: Any, tensors: dict[fx.Node, torch.Tensor], made: Any) -> Any:
        if not isinstance(item, fx.Node):
            return item
        return tensors[item] if item in tensors else next(made)


__all__ = ["Plan", "PlanMismatchError", "TraceError", "apply", "remove"]
