"""torch.compile within a budget in bytes.

    compile(model, batch, budget="16GB", optimizer=optimizer)     # train as before

The module is compiled as torch.compile does it, and a step is rehearsed and measured. If it fits,
that is the answer. If not, it is compiled again with a partition that our solver plans
(`scheduler_runtime.compiler.partitioner`) for so many bytes less as the measured peak was too high:
fusion moves the peak in ways that no graph shows, so what was predicted is corrected by what was
measured, until it fits.
"""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs import hardware
from graphs.calls import Call, as_call, device_of
from graphs.costs import Roofline
from graphs.training_step import optimizer_costs
from scheduler_runtime.applying import remove
from scheduler_runtime.compiler.fused_costs import FusedCosts
from scheduler_runtime.compiler.loop import Attempt, CompileLoop, shown_bytes
from scheduler_runtime.compiler.partitioner import BudgetPartitioner
from scheduler_runtime.compiler.rehearsal import Rehearsal
from scheduler_runtime.measuring import bytes_of, resident_tensors
from scheduler_runtime.planned import PlannedForward, refuse_second
from scheduler_runtime.surroundings import budget_on
from solver.common import (
    BudgetError,
    counted,
    format_share,
    format_size,
)

logger = logging.getLogger(__name__)

N_KEPT = 8
"""Compiled calls of other shapes or settings that are kept for a module."""


@dataclass(frozen=True)
class CompileReport:
    """What was tried for one kind of call, in order, and which attempt is in force."""

    backend: str
    budget_bytes: int
    available_bytes: int
    attempts: tuple[Attempt, ...]
    chosen: Attempt
    optimizer_peak_bytes: int

    def __str__(self) -> str:
        peak = shown_bytes(self.chosen.measured_bytes)
        within = format_size(self.available_bytes)
        lines = [f"compiled by {self.backend} within {within}: measured peak {peak}"]
        for number, attempt in enumerate(self.attempts):
            plan = attempt.partition
            how = (
                "PyTorch's partition"
                if not plan.n_recomputed
                else f"{counted(plan.n_recomputed, 'op')} run again"
            )
            lines.append(
                f"  attempt {number}: predicted {format_size(plan.predicted_bytes)}, measured "
                f"{shown_bytes(attempt.measured_bytes)}, saved {format_size(plan.saved_bytes)}, "
                f"{how}, {format_share(plan.overhead)} by the cost model"
                + (", in force" if attempt is self.chosen else "")
            )
        return "\n".join(lines)


def compile(
    model: nn.Module,
    batch: Any = None,
    *,
    budget: int | str,
    reserve: int | str | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "inductor",
    method: str = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    max_attempts: int = 5,
    costs: FusedCosts | None = None,
) -> nn.Module:
    """Replace the module's forward by its compiled form within a budget; returns the same module.

    batch, loss, inputs, optimizer, budget, reserve, method, time_limit_s, seed: as in
        `solver.solve`. With a batch the step is compiled now, in the mode that the model is in (the
        other mode runs as it is), without one at the first forward pass in training mode. Then the
        loss must be the model's own; of a model without one the sum of its outputs is rehearsed, so
        that a loss outside is not counted.
    backend: "inductor", or "aot_eager": the same partition run operator by operator.
    max_attempts: compilations at most, the one without a plan included.

    The forward pass of another shape or setting is compiled and rehearsed in its turn. Gradients
    are those of the same backend without a budget; with Inductor up to the rounding of kernels
    that are fused differently. `compile_reports(model)` tells what was tried.

    `remove(model)` or `uncompile(model)` undoes it.

    Raises GraphBreakError where the module is not one graph; BudgetError where nothing was found
    that fits; TraceError (forward changes attributes of the module, say); ValueError, also for a
    module that has a plan.
    """
    refuse_second(model)
    if loss is not None and batch is None:
        raise ValueError("a loss of (output, batch) can only be rehearsed with a batch: give one")
    if max_attempts < 1:
        raise ValueError(f"max_attempts is {max_attempts}; it must be at least 1")
    device = device_of(model)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on {device}; peaks can be measured on cpu and cuda")
    budget_bytes, reserve_bytes = budget_on(device, budget, reserve)
    partitioner = functools.partial(
        BudgetPartitioner, method=method, time_limit_s=time_limit_s, seed=seed, costs=costs
    )
    forward = BudgetedForward(
        model,
        budget_bytes=budget_bytes,
        available_bytes=budget_bytes - reserve_bytes,
        backend=backend,
        optimizer=optimizer,
        max_attempts=max_attempts,
        partitioner=partitioner,
        covers_training=batch is None or model.training,
    )
    if batch is not None:
        if not model.training:
            warnings.warn(
                "compile: the model is in evaluation mode, and it is compiled for that alone; call "
                "model.train() before if it is to be trained",
                stacklevel=2,
            )
        chosen = None if loss is None else functools.partial(_loss_of, loss, batch)
        forward.prepare(forward.call_of(*as_call(batch, inputs)), loss=chosen)
    model.forward = forward
    return model


def _loss_of(loss: Callable[[Any, Any], torch.Tensor], batch: Any, output: Any) -> torch.Tensor:
    return loss(output, batch)


def uncompile(model: nn.Module) -> nn.Module:
    """Undo `compile`: the module runs its own forward again. Returns the same module."""
    _budgeted(model)
    return remove(model)


def compile_reports(model: nn.Module) -> tuple[CompileReport, ...]:
    """What was tried for each kind of call so far."""
    return tuple(_budgeted(model).reports)


def _budgeted(model: nn.Module) -> BudgetedForward:
    forward = model.__dict__.get("forward")
    if not isinstance(forward, BudgetedForward):
        raise ValueError("the module is not compiled within a budget")
    return forward


@dataclass(frozen=True)
class _Function:
    """A compiled forward, for calls of the kind that it was compiled for."""

    function: Callable[..., Any]

    def fits(self, _model: nn.Module, _call: Call) -> bool:
        return True

    def run(self, _model: nn.Module, call: Call) -> Any:
        args, kwargs = call.arguments(call.tensors)
        return self.function(*args, **kwargs)


class BudgetedForward(PlannedForward):
    """Compiles for each kind of call, in training mode or in evaluation mode."""

    n_kept = N_KEPT

    def __init__(
        self,
        model: nn.Module,
        *,
        budget_bytes: int,
        available_bytes: int,
        backend: str,
        optimizer: torch.optim.Optimizer | None,
        max_attempts: int,
        partitioner: Callable[..., BudgetPartitioner],
        covers_training: bool,
    ) -> None:
        super().__init__(model)
        self.reports: list[CompileReport] = []
        self._budget_bytes = budget_bytes
        self._available_bytes = available_bytes
        self._backend = backend
        self._optimizer = optimizer
        self._max_attempts = max_attempts
        self._partitioner = partitioner
        self._covers_training = covers_training

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reports": []}

    def covers(self) -> bool:
        return self._model.training or not self._covers_training

    def program_for(self, call: Call) -> _Function:
        return self._measured(call, loss=None)

    def prepare(self, call: Call, *, loss: Callable[[Any], torch.Tensor] | None) -> None:
        """Compile for calls like this one before they come."""
        self._programs.add(self.kind(call), self._measured(call, loss=loss))

    def _measured(self, call: Call, *, loss: Callable[[Any], torch.Tensor] | None) -> _Function:
        """Compile, and measure, until it fits."""
        args, kwargs = call.arguments(call.tensors)
        state_bytes, workspace_bytes = _optimizer_bytes(self._model, self._optimizer)
        gradients = [p for p in self._model.parameters() if p.requires_grad and p.grad is None]
        optimizers = () if self._optimizer is None else (self._optimizer,)
        there = resident_tensors(self._model, (args, kwargs), optimizers)
        optimizer_peak_bytes = (
            bytes_of(there, gradients[0].device if gradients else torch.device("cpu"))
            + sum(p.numel() * p.element_size() for p in gradients)
            + state_bytes
            + workspace_bytes
        )
        if self._optimizer is not None and optimizer_peak_bytes > self._available_bytes:
            raise BudgetError(
                f"the optimizer's step alone takes {optimizer_peak_bytes} bytes (parameters, "
                f"gradients, state and temporaries), above {self._available_bytes}; recomputing "
                "activations cannot help"
            )
        rehearsal = Rehearsal(
            model=self._model,
            args=args,
            kwargs=kwargs,
            loss=loss,
            optimizer=self._optimizer,
            outside_bytes=state_bytes,
        )
        loop = CompileLoop(
            rehearsal,
            self._own_method(),
            backend=self._backend,
            partitioner=self._partitioner,
            available_bytes=self._available_bytes,
            max_attempts=self._max_attempts,
        )
        with torch._functorch.config.patch(enable_autograd_cache=False):
            chosen, function = loop.run()
        report = CompileReport(
            backend=self._backend,
            budget_bytes=self._budget_bytes,
            available_bytes=self._available_bytes,
            attempts=tuple(loop.attempts),
            chosen=chosen,
            optimizer_peak_bytes=optimizer_peak_bytes,
        )
        self.reports.append(report)
        logger.info("%s", report)
        return _Function(function)

    def _own_method(self) -> Callable[..., Any]:
        """The module's own forward as a method, which the compiler knows best."""
        if self.instance_forward is not None:
            return self.instance_forward  # type: ignore[no-any-return]
        return types.MethodType(type(self._model).forward, self._model)


def _optimizer_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[int, int]:
    """State that the optimizer has not made yet, and what its step takes beside it."""
    if optimizer is None:
        return 0, 0
    device = device_of(model)
    cost = optimizer_costs(optimizer, model, device=device, costs=Roofline(hardware.named("cpu")))
    return (0 if optimizer.state else cost.state_bytes), cost.workspace_bytes
