"""Ways to train a model in less memory, ours and others', behind one signature.

A way prepares a model for a budget and returns what it predicts. The caller then runs the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

import scheduler_runtime
from benchmarks.gpu import turns
from benchmarks.zoo import Subject
from scheduler_runtime.measuring import free_unreferenced
from solver import solve
from solver.schedule.reserved_memory import reserved


@dataclass(frozen=True)
class Prepared:
    """A model prepared for a budget.

    call: what to call in place of the model.
    predicted_bytes: peak that the plan predicts; this and what follows is None without a plan.
    planned_bytes: the same before the allocator rounds sizes up.
    predicted_reserved_bytes: what the allocator is predicted to reserve on the device.
    overhead: predicted overhead of the plan.
    bound: lower bound on the overhead of any plan.
    predicted_s: predicted time of the step.
    undo: to call after the measurement.
    replays: whether steps are recorded as CUDA graphs.
    """

    call: Callable[..., Any]
    predicted_bytes: int | None = None
    planned_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    overhead: float | None = None
    bound: float | None = None
    predicted_s: float | None = None
    undo: Callable[[], object] = lambda: None
    replays: bool = False


@dataclass(frozen=True)
class Setting:
    """What a way prepares the model for.

    share: the share of the activations that may be live (None: no budget).
    budget_bytes: for the whole step, reserve_bytes included.
    optimizer: the one that trains the model (None: plan without one).
    time_limit_s: of each search.
    backend: of torch.compile.
    reserve_bytes: part of the budget that plans leave unused.
    """

    share: float | None
    budget_bytes: int
    optimizer: torch.optim.Optimizer | None
    time_limit_s: float
    backend: str = "inductor"
    reserve_bytes: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Options for `solve` and `scheduler_runtime.compile`."""
        return {
            "budget": self.budget_bytes,
            "reserve": self.reserve_bytes,
            "optimizer": self.optimizer,
            "time_limit_s": self.time_limit_s,
        }


Batch = tuple[torch.Tensor, ...]
Way = Callable[[nn.Module, Batch, Subject, Setting], Prepared]


def eager(model: nn.Module, _batch: Any, _subject: Subject, _setting: Setting) -> Prepared:
    return Prepared(model)


def _checkpointing_way(every: int, context: Callable[[], Any] | None = None) -> Way:
    """The way that puts torch.utils.checkpoint around each `every`-th block.

    context: `context_fn` of torch.utils.checkpoint.
    """

    def prepare(model: nn.Module, _batch: Any, subject: Subject, _setting: Setting) -> Prepared:
        wrapped = subject.blocks(model)[::every]
        if not wrapped:
            raise NotImplementedError("the model has no blocks to checkpoint")
        options = {} if context is None else {"context_fn": context}
        for block in wrapped:
            block.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint.checkpoint, block.forward, use_reentrant=False, **options
            )

        def undo() -> None:
            for block in wrapped:
                del block.forward

        return Prepared(model, undo=undo)

    return prepare


_aten = torch.ops.aten
_SAVED_OPS = (
    *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.convolution.default),
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def compiled(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
    prepared = _prepare_compiled(model, setting)
    _compile_now(prepared, model, batch)
    return prepared


def _prepare_compiled(model: nn.Module, setting: Setting) -> Prepared:
    torch._dynamo.reset()
    call = torch.compile(model, backend=setting.backend, dynamic=False)
    return Prepared(call, undo=torch._dynamo.reset)


def memory_budget(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
    """torch.compile with `activation_memory_budget`, a share of what its partitioner would save."""
    prepared = _prepare_compiled(model, setting)
    share = 1.0 if setting.share is None else setting.share
    with torch._functorch.config.patch(activation_memory_budget=share):
        _compile_now(prepared, model, batch)  # compilation reads the patched setting
    return prepared


def _compile_now(prepared: Prepared, model: nn.Module, batch: Batch) -> None:
    """Run one forward and backward pass, which compiles both, and drop its memory."""
    with turns.turn_shared():
        prepared.call(*batch).backward()
        for parameter in model.parameters():
            parameter.grad = None
        free_unreferenced(batch[0].device)


def _planned_way(*, cuda_graph: bool = False, host_budget: str | None = None) -> Way:
    """The way that applies a plan of `solve`, recorded as a CUDA graph or with copies to the host
    if wanted."""

    def prepare(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
        # Measured, because a roofline does not know workspaces, without which budgets are exceeded.
        costs = turns.MeasuredInTurn(batch[0].device)
        with turns.turn_released():
            solution = solve(model, batch, costs=costs, host_budget=host_budget, **setting.options)
            if solution.simulation is None or solution.schedule is None:
                raise ValueError(f"nothing fits ({solution.status})")
            memory = reserved(solution.graph, solution.schedule)
        scheduler_runtime.apply(model, solution, cuda_graph=cuda_graph, optimizer=setting.optimizer)
        planned_bytes = solution.simulation.peak_bytes
        is_cuda = batch[0].is_cuda  # the CPU's allocator does not round
        return Prepared(
            model,
            predicted_bytes=memory.allocated_bytes if is_cuda else planned_bytes,
            planned_bytes=planned_bytes,
            predicted_reserved_bytes=memory.reserved_bytes if is_cuda else None,
            overhead=solution.overhead,
            bound=solution.lower_bound_s / solution.baseline.time_s - 1.0,
            predicted_s=solution.simulation.time_s,
            undo=lambda: scheduler_runtime.remove(model),
            replays=cuda_graph,
        )

    return prepare


def ours_compiled(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
    with turns.turn_shared():
        scheduler_runtime.compile(model, batch, backend=setting.backend, **setting.options)
    (report,) = scheduler_runtime.compile_reports(model)
    partition = report.chosen.partition
    return Prepared(
        model,
        predicted_bytes=partition.predicted_bytes,
        overhead=partition.overhead,
        bound=partition.lower_bound,
        undo=lambda: scheduler_runtime.uncompile(model),
    )


WAYS: Mapping[str, Way] = {
    "eager": eager,
    "every block": _checkpointing_way(1),
    "every second block": _checkpointing_way(2),
    "selective": _checkpointing_way(
        1, lambda: checkpoint.create_selective_checkpoint_contexts(list(_SAVED_OPS))
    ),
    "compile": compiled,
    "compile, memory budget": memory_budget,
    "ours": _planned_way(),
    "ours, host": _planned_way(host_budget="64GB"),
    "ours, CUDA graph": _planned_way(cuda_graph=True),
    "ours, compiled": ours_compiled,
}

WITH_BUDGET = (
    "compile, memory budget",
    "ours",
    "ours, host",
    "ours, CUDA graph",
    "ours, compiled",
)
"""The ways that follow a budget; each of the others has a single memory-time point."""
