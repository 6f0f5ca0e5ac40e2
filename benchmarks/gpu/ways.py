"""Ways to train a model in less memory, ours and others', behind one signature.

A way prepares a model for a budget and says what it predicts; the model is then called as before.
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
    predicted_bytes, predicted_s, overhead: of the plan, where there is one. planned_bytes: before
        the allocator rounds up; predicted_reserved_bytes: what it takes from the device.
    bound: no plan has less overhead.
    undo: after the measurement.
    replays: steps are recorded as CUDA graphs.
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
    """What a way is prepared for.

    share: of the activations that may be held (None: no budget).
    budget_bytes: of the whole step, reserve_bytes included.
    time_limit_s: of each search.
    """

    share: float | None
    budget_bytes: int
    optimizer: torch.optim.Optimizer | None
    time_limit_s: float
    backend: str = "inductor"
    reserve_bytes: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Those of `solve` and `scheduler_runtime.compile`."""
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


def _checkpointed(every: int, context: Callable[[], Any] | None = None) -> Way:
    """torch.utils.checkpoint around each `every`-th block."""

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
_KEPT = (
    *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.convolution.default),
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def compiled(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
    prepared = _to_compile(model, setting)
    _compile_now(prepared, model, batch)
    return prepared


def _to_compile(model: nn.Module, setting: Setting) -> Prepared:
    torch._dynamo.reset()
    call = torch.compile(model, backend=setting.backend, dynamic=False)
    return Prepared(call, undo=torch._dynamo.reset)


def memory_budget(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
    """torch.compile with its own knob, a share of what its partitioner would save."""
    prepared = _to_compile(model, setting)
    share = 1.0 if setting.share is None else setting.share
    with torch._functorch.config.patch(activation_memory_budget=share):
        _compile_now(prepared, model, batch)  # with the knob as it is now
    return prepared


def _compile_now(prepared: Prepared, model: nn.Module, batch: Batch) -> None:
    with turns.shared():
        prepared.call(*batch).backward()
        for parameter in model.parameters():
            parameter.grad = None
        free_unreferenced(batch[0].device)


def _planned(*, cuda_graph: bool = False, host_budget: str | None = None) -> Way:
    def prepare(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
        # A roofline knows no workspace, and a kept budget needs it.
        costs = turns.MeasuredInTurn(batch[0].device)
        with turns.given_up():
            solution = solve(model, batch, costs=costs, host_budget=host_budget, **setting.options)
            if solution.simulation is None or solution.schedule is None:
                raise ValueError(f"nothing fits ({solution.status})")
            taken = reserved(solution.graph, solution.schedule)
        scheduler_runtime.apply(model, solution, cuda_graph=cuda_graph, optimizer=setting.optimizer)
        planned_bytes = solution.simulation.peak_bytes
        is_cuda = batch[0].is_cuda  # the CPU's allocator does not round
        return Prepared(
            model,
            predicted_bytes=taken.allocated_bytes if is_cuda else planned_bytes,
            planned_bytes=planned_bytes,
            predicted_reserved_bytes=taken.reserved_bytes if is_cuda else None,
            overhead=solution.overhead,
            bound=solution.lower_bound_s / solution.baseline.time_s - 1.0,
            predicted_s=solution.simulation.time_s,
            undo=lambda: scheduler_runtime.remove(model),
            replays=cuda_graph,
        )

    return prepare


def ours_compiled(model: nn.Module, batch: Batch, _subject: Subject, setting: Setting) -> Prepared:
    with turns.shared():
        scheduler_runtime.compile(model, batch, backend=setting.backend, **setting.options)
    (report,) = scheduler_runtime.compile_reports(model)
    chosen = report.chosen.partition
    return Prepared(
        model,
        predicted_bytes=chosen.predicted_bytes,
        overhead=chosen.overhead,
        bound=chosen.lower_bound,
        undo=lambda: scheduler_runtime.uncompile(model),
    )


WAYS: Mapping[str, Way] = {
    "eager": eager,
    "every block": _checkpointed(1),
    "every second block": _checkpointed(2),
    "selective": _checkpointed(
        1, lambda: checkpoint.create_selective_checkpoint_contexts(list(_KEPT))
    ),
    "compile": compiled,
    "compile, memory budget": memory_budget,
    "ours": _planned(),
    "ours, host": _planned(host_budget="64GB"),
    "ours, CUDA graph": _planned(cuda_graph=True),
    "ours, compiled": ours_compiled,
}

WITH_BUDGET = (
    "compile, memory budget",
    "ours",
    "ours, host",
    "ours, CUDA graph",
    "ours, compiled",
)
"""Those that follow a budget; the others have one point each."""
