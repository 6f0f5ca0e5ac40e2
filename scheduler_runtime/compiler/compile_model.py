"""torch.compile within a budget in bytes.

    compile(model, batch, budget="16GB", optimizer=optimizer)     # train as before

The module is compiled as by torch.compile, and the peak memory of a step is measured. If the step
fits, nothing more is done. If not, the module is compiled again with a partition that our solver
plans (`scheduler_runtime.compiler.partitioner`), for a budget corrected by the difference of
measured and predicted peak: fusion moves the peak in ways that no graph shows. That is repeated
until the step fits.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs import hardware
from graphs.costs import Roofline
from graphs.graph import warn
from graphs.model_calls import Call, as_call, device_of, gradient_bytes
from graphs.training_step import GivenOptimizer, optimizer_costs, read_optimizer
from scheduler_runtime.applying import remove
from scheduler_runtime.compiler.fused_costs import FusedCosts
from scheduler_runtime.compiler.loop import Attempt, CompileLoop, Target, format_peak
from scheduler_runtime.compiler.partitioner import BudgetPartitioner
from scheduler_runtime.compiler.rehearsal import Rehearsal
from scheduler_runtime.measuring import bytes_of, resident_tensors
from scheduler_runtime.planned import PlannedForward, refuse_second
from scheduler_runtime.surroundings import budget_for
from solver.sizes_deadlines_progress import (
    BudgetError,
    counted,
    format_share,
    format_size,
    format_time,
    names_checked,
    now_s,
    tell,
)


@dataclass(frozen=True)
class CompileReport:
    """What was tried for one kind of call.

    budget_bytes, available_bytes: the budget, with and without the reserve.
    attempts: all compilations, in order.
    chosen: the attempt in use.
    optimizer_peak_bytes: peak of the optimizer's step, which no compilation can lower.
    """

    backend: str
    budget_bytes: int
    available_bytes: int
    attempts: tuple[Attempt, ...]
    chosen: Attempt
    optimizer_peak_bytes: int

    @property
    def line(self) -> str:
        """The attempt in use, in one line."""
        within = format_size(self.available_bytes)
        peak = format_peak(self.chosen.measured_bytes)
        return f"compiled by {self.backend} within {within}: measured peak {peak}"

    def __str__(self) -> str:
        lines = [self.line]
        for number, attempt in enumerate(self.attempts):
            plan = attempt.partition
            n_ops = plan.n_recomputed
            how = f"{counted(n_ops, 'op')} recomputed" if n_ops else "PyTorch's partition"
            lines.append(
                f"  attempt {number}: predicted {format_size(plan.predicted_bytes)}, measured "
                f"{format_peak(attempt.measured_bytes)}, saved {format_size(plan.saved_bytes)}, "
                f"{how}, predicted overhead {format_share(plan.overhead)}"
                + (", in use" if attempt is self.chosen else "")
            )
        return "\n".join(lines)


@names_checked
def compile(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | float | str,
    reserve: int | float | str | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: GivenOptimizer | None = None,
    backend: str = "inductor",
    method: str = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    max_attempts: int = 5,
    costs: FusedCosts | None = None,
) -> nn.Module:
    """Replace the module's forward by its compiled form within a budget; returns the same module.

    batch, loss, inputs, optimizer, budget, reserve, method, time_limit_s, seed: as in
        `solver.solve`. With a batch, the step is compiled now, for the model's present mode (train
        or eval). Without one, it is compiled at the first forward pass in training mode; then the
        loss must be in the model's output, or the sum of the outputs is measured instead.
    backend: "inductor", or "aot_eager", which runs the same partition operator by operator.
    max_attempts: the most compilations, the one without a plan included.
    costs: cost model of the operators (None: measured on CUDA, the roofline elsewhere).

    A call of another shape or setting is compiled and measured when it comes. Gradients are those
    of the same backend without a budget; with Inductor, up to the rounding of kernels that are
    fused differently. `compile_reports(model)` returns what was tried; `remove(model)` or
    `uncompile(model)` undoes it.

    Raises GraphBreakError if the module is not one graph; BudgetError if nothing fits; TraceError,
    for example if forward changes attributes of the module; ValueError for invalid options and for
    a module that has a plan.
    """
    refuse_second(model)
    if loss is not None and batch is None:
        raise ValueError("loss=... is computed from (output, batch); call compile with a batch too")
    if max_attempts < 1:
        raise ValueError(f"max_attempts is {max_attempts}; it must be at least 1")
    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on {device}; peaks can be measured on cpu and cuda")
    budget_bytes, reserve_bytes = budget_for(model, budget, reserve)
    target = Target(
        backend=backend,
        budget_bytes=budget_bytes,
        available_bytes=budget_bytes - reserve_bytes,
        max_attempts=max_attempts,
        partitioner=functools.partial(
            BudgetPartitioner, method=method, time_limit_s=time_limit_s, seed=seed, costs=costs
        ),
    )
    own = None if optimizer is None else read_optimizer(optimizer, model)
    covers_training = batch is None or model.training
    forward = CompiledForward(model, target, optimizer=own, covers_training=covers_training)
    if batch is not None:
        if not model.training:
            warn(
                "compile: the model is in evaluation mode and is compiled for that mode only; to "
                "train it, call model.train() before compile"
            )
        measured_loss = None if loss is None else lambda output: loss(output, batch)
        call = forward.call_of(*as_call(batch, inputs))
        forward.prepare(call, loss=measured_loss, loss_reads=batch)
    model.forward = forward
    return model


def uncompile(model: nn.Module) -> nn.Module:
    """Undo `compile`: the module runs its own forward again. Returns the same module."""
    _compiled_forward(model)
    return remove(model)


def compile_reports(model: nn.Module) -> tuple[CompileReport, ...]:
    """What was tried for each kind of call so far. Raises ValueError without `compile`."""
    return tuple(_compiled_forward(model).reports)


def _compiled_forward(model: nn.Module) -> CompiledForward:
    forward = model.__dict__.get("forward")
    if not isinstance(forward, CompiledForward):
        raise ValueError("the module is not compiled within a budget")
    return forward


@dataclass(frozen=True)
class _CompiledStep:
    """A compiled forward, for the kind of call that it was compiled for."""

    function: Callable[..., Any]

    def fits(self, _model: nn.Module, _call: Call) -> bool:
        return True

    def run(self, _model: nn.Module, call: Call) -> Any:
        args, kwargs = call.arguments(call.tensors)
        return self.function(*args, **kwargs)


class CompiledForward(PlannedForward):
    """Compiles for each kind of call, in training mode or in evaluation mode."""

    made_by = "compile"
    n_kept = 8  # compiled steps, for calls of different shapes or settings
    saves_for_autograd = True

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        *,
        optimizer: torch.optim.Optimizer | None,
        covers_training: bool,
    ) -> None:
        super().__init__(model)
        self.reports: list[CompileReport] = []
        self._target = target
        self._optimizer = optimizer
        self._covers_training = covers_training

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reports": []}

    def covers(self) -> bool:
        return self._model.training or not self._covers_training

    def program_for(self, call: Call) -> _CompiledStep:
        return self._compile_until_it_fits(call, loss=None, loss_reads=None)

    def prepare(
        self, call: Call, *, loss: Callable[[Any], torch.Tensor] | None, loss_reads: Any
    ) -> None:
        """Compile now for later calls of the same kind as this one.

        loss, loss_reads: as in `Rehearsal`.
        """
        compiled = self._compile_until_it_fits(call, loss=loss, loss_reads=loss_reads)
        # the kind of later calls: the first one may set what they read (transformers' configs)
        self._programs.add(self.kind(call), compiled)

    def _compile_until_it_fits(
        self, call: Call, *, loss: Callable[[Any], torch.Tensor] | None, loss_reads: Any
    ) -> _CompiledStep:
        """Compile and measure until the step fits."""
        started_s = now_s()
        model, optimizer, target = self._model, self._optimizer, self._target
        args, kwargs = call.arguments(call.tensors)
        new_state_bytes, optimizer_workspace_bytes = 0, 0
        if optimizer is not None:
            roofline = Roofline(hardware.named("cpu"))
            cost = optimizer_costs(optimizer, model, device=device_of(model), costs=roofline)
            new_state_bytes = 0 if optimizer.state else cost["state_bytes"]
            optimizer_workspace_bytes = cost["workspace_bytes"]
        gradients = [p for p in model.parameters() if p.requires_grad and p.grad is None]
        optimizers = () if optimizer is None else (optimizer,)
        where = gradients[0].device if gradients else torch.device("cpu")
        given = (args, kwargs, loss_reads)
        optimizer_peak_bytes = bytes_of(resident_tensors(model, given, optimizers), where)
        optimizer_peak_bytes += sum(map(gradient_bytes, gradients))
        optimizer_peak_bytes += new_state_bytes + optimizer_workspace_bytes
        if optimizer is not None and optimizer_peak_bytes > target.available_bytes:
            raise BudgetError(
                f"the optimizer's step alone takes {optimizer_peak_bytes} bytes (parameters, "
                f"gradients, state and temporaries) of {target.available_bytes} available; "
                "recomputing activations cannot help"
            )
        rehearsal = Rehearsal(
            model, args, kwargs, loss, loss_reads, optimizers, outside_bytes=new_state_bytes
        )
        # a bound method: torch.compile traces it better than our replacement
        forward = self.instance_forward or types.MethodType(type(model).forward, model)
        loop = CompileLoop(rehearsal, forward, target)
        with torch._functorch.config.patch(enable_autograd_cache=False):
            chosen, function = loop.run()
        report = CompileReport(
            backend=target.backend,
            budget_bytes=target.budget_bytes,
            available_bytes=target.available_bytes,
            attempts=tuple(loop.attempts),
            chosen=chosen,
            optimizer_peak_bytes=optimizer_peak_bytes,
        )
        self.reports.append(report)
        took = f"{counted(len(loop.attempts), 'attempt')}, {format_time(now_s() - started_s)}"
        tell(f"{type(model).__name__}: {report.line} ({took})")
        return _CompiledStep(function)
