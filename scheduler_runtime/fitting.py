"""Plan a module with one line: the plan is made at the first forward pass of the training.

    fit(model, budget="16GB", optimizer=optimizer)      # train as before
    remove(model)                                       # restores the module's own forward

The module is traced with the batch that it is called with, planned and run. A call of another kind
(another shape, autocast, gradients that exist already) is planned when it comes, within the same
budget. `plans_of(model)` returns the plans.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.calls import Call, TraceError, device_of, find_loss, nested
from graphs.costs import CostModel, default_costs, finish_measuring
from graphs.graph import Graph
from graphs.rewrites import check_word, variants_of
from graphs.trace import CapturedStep
from graphs.training_step import (
    optimizer_costs,
    together,
    with_optimizer,
    with_resident,
    with_unknown_loss,
)
from scheduler_runtime.execute import BoundProgram, build_program, kept_bytes
from scheduler_runtime.planned import PlannedForward, module_schedule, new_plan, refuse_second
from scheduler_runtime.surroundings import (
    Buckets,
    buckets_of,
    budget_for,
    free_budget_bytes,
    no_checkpoints,
    refuse_auto_budget,
    refuse_checkpointing,
    size_on,
    why_not_planned,
)
from solver.common import counted, format_both, telling
from solver.methods import METHODS, KnownPlan
from solver.schedule import Request, Solution

logger = logging.getLogger(__name__)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class FitError(ValueError):
    """No schedule fits the budget, or the module cannot be fitted as it is; says why."""


@dataclass(frozen=True)
class Fitted:
    """A plan that `fit` made.

    notes: sentences on what it counts and what it does not.
    reused: without a search: what an earlier plan recomputes serves this call too.
    """

    solution: Solution
    notes: tuple[str, ...]
    reused: bool = False

    def __str__(self) -> str:
        return "\n".join((repr(self.solution), *(f"note: {note}" for note in self.notes)))


@dataclass(frozen=True)
class Options:
    """Of `fit`, whose docstring explains each."""

    budget: int | float | str
    reserve: int | float | str | None
    loss_reserve: int | float | str | None
    loss_outputs: Callable[[Any], Any] | None
    method: str
    time_limit_s: float
    seed: int
    costs: CostModel | None
    rewrites: str


def fit(
    model: nn.Module,
    *,
    budget: int | float | str = "auto",
    optimizer: Optimizers = None,
    reserve: int | float | str | None = None,
    loss_reserve: int | float | str | None = None,
    loss_outputs: Callable[[Any], Any] | None = None,
    method: str = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    costs: CostModel | None = None,
    rewrites: str = "bitwise",
) -> nn.Module:
    """Plan the training step of `model` when it first runs; returns the same module.

    If forward returns the loss (a scalar, `.loss`, or the only scalar of a tuple), the loss is
    differentiated. Otherwise all floating-point outputs that require a gradient are expected to
    receive one from outside. Where the backward pass brings others, the step runs again with a plan
    for these, and later calls are planned for them from the start. Where two losses take turns,
    each step after a change runs its forward pass twice.

    budget: bytes of the device for the whole step, "16GB"; "auto": what is free on the CUDA device
        at the first forward pass, plus what the step itself occupies there.
    optimizer: the one that trains the model, or several; their state and their step are counted.
    reserve: bytes of the budget that the step may not use (default: CUDA_RESERVE_BYTES on CUDA,
        else 0).
    loss_reserve: bytes that a loss outside takes besides its inputs and their gradients (default:
        twice its inputs in 32 bits, three times if they have 16: what cross-entropy takes).
    loss_outputs: a function of the output: those of its tensors that the loss outside is computed
        from (`lambda output: output.logits`). None: all.
    method, time_limit_s, seed, rewrites: as in `solver.solve`, for each plan.
    costs: seconds and workspace of each operator (default: as in `graphs.trace.trace`).

    Raises ValueError for invalid options and for a module that has a plan; FitError for one that is
    compiled or wrapped; CheckpointedAlreadyError for one that uses activation checkpointing. The
    first forward pass raises TraceError (it cannot be traced) and FitError (nothing fits).
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; one of {', '.join(METHODS)}")
    device = device_of(model)
    if budget != "auto":
        budget_for(model, budget, reserve)
    elif not torch.cuda.is_available():  # with one, the model may still be moved there
        refuse_auto_budget(device)
    refuse_second(model)
    reason = why_not_planned(model)
    if reason is not None:
        raise FitError(reason)
    refuse_checkpointing(model)
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    optimizers = () if optimizer is None else tuple(map(_unwrapped, several))
    options = Options(
        budget,
        reserve,
        loss_reserve,
        loss_outputs,
        method,
        time_limit_s,
        seed,
        costs,
        check_word(rewrites),
    )
    model.forward = FittedForward(model, options, optimizers)
    return model


def plans_of(model: nn.Module) -> tuple[Fitted, ...]:
    """The plans made so far, oldest first. Raises ValueError for a module that `fit` has not."""
    fitted = model.__dict__.get("forward")
    if not isinstance(fitted, FittedForward):
        raise ValueError("fit was not called on this module")
    return tuple(fitted.plans)


class FittedForward(PlannedForward):
    """Makes a plan for each kind of call, in training mode."""

    def __init__(
        self, model: nn.Module, options: Options, optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> None:
        super().__init__(model)
        self.options = options
        self.plans: list[Fitted] = []
        self._optimizers = optimizers
        self._budget_bytes: int | None = None
        self._reached: tuple[int, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The optimizer belongs to the original, not to a copy of the module."""
        return {**super().__getstate__(), "_optimizers": (), "plans": []}

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="the module has a plan from fit, which runs operator by operator; "
        "scheduler_runtime.remove(model) undoes it"
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
        refuse_checkpointing(self._model)
        device, buckets = device_of(self._model), buckets_of(self._model)
        request = self._request(call, device, buckets)
        costs = self.options.costs or default_costs(device)
        name = type(self._model).__name__
        with telling(f"tracing {name}...") as say:
            with no_checkpoints():
                step = self.traced(
                    call,
                    choose=self._gradient_outputs,
                    gradients="accumulate" if self._accumulates(buckets) else "fresh",
                    costs=costs,
                    rewrites=(),
                )
            if not held_bytes:  # the step that runs again is given what the first pass has kept
                held_bytes = kept_bytes(step.captured, device)
            around, notes = self._around(step, device, costs, buckets, held_bytes=held_bytes)
            say(f"planning {name} ({counted(len(step.graph.nodes), 'op')})...")
            found = new_plan(
                step,
                around,
                request,
                planned=variants_of(self.options.rewrites),
                known=[KnownPlan.of(each.solution) for each in self.plans if not each.reused],
            )
            finish_measuring(costs)  # after planning, which may measure ops of other variants
        solution = found.solution
        if solution.schedule is None:
            raise FitError(
                f"no schedule of {type(self._model).__name__}'s step fits "
                f"{format_both(solution.request.available_bytes)} ({solution.status})"
                f"{solution.obstacle_text}"
            )
        self.plans.append(Fitted(solution, notes, found.reused))
        how = "from an earlier plan" if found.reused else "planned"
        logger.info("%s in %.2f s: %s", how, solution.solve_time_s, self.plans[-1])
        step = step.with_rewrites(solution.graph.meta.rewrites)
        part = step.graph.module_part()
        returned_bytes = sum(part.tensor_by_name[name].size_bytes for name in part.returned)
        return BoundProgram(
            step,
            build_program(
                step, module_schedule(solution.schedule, part), places=solution.request.places
            ),
            other=functools.partial(self._for_gradients, returned_bytes=returned_bytes),
        )

    def _accumulates(self, buckets: Buckets | None) -> bool:
        """Whether gradients exist before the step."""
        if buckets is not None and buckets.are_gradients:
            return True
        return any(p.grad is not None for p in self._model.parameters() if p.requires_grad)

    def _request(self, call: Call, device: torch.device, buckets: Buckets | None) -> Request:
        options = self.options
        budget: int | float | str = options.budget
        if self._budget_bytes is not None:  # later plans share the budget of the first
            budget = self._budget_bytes
        elif budget == "auto":
            bucket_bytes = 0 if buckets is None else buckets.separate_bytes
            budget = free_budget_bytes(
                self._model, call, self._optimizers, device, bucket_bytes=bucket_bytes
            )
        self._budget_bytes, reserve_bytes = budget_for(self._model, budget, options.reserve)
        return Request(
            budget_bytes=self._budget_bytes,
            reserve_bytes=reserve_bytes,
            method=options.method,
            time_limit_s=options.time_limit_s,
            seed=options.seed,
            rewrites=options.rewrites,
        )

    def _gradient_outputs(self, output: Any) -> tuple[int, ...]:
        """Indices of the flat outputs that receive a gradient."""
        flat = nested.leaves(output)
        if self._reached is not None:
            chosen = [flat[index] for index in self._reached if index < len(flat)]
        elif self.options.loss_outputs is None:
            try:
                chosen = [find_loss(output)]
            except TraceError:
                chosen = flat
        else:
            chosen = nested.leaves(self.options.loss_outputs(output))
        named = {id(item) for item in chosen if isinstance(item, torch.Tensor)}
        indices = tuple(
            index
            for index, item in enumerate(flat)
            if id(item) in named and item.requires_grad and item.is_floating_point()
        )
        if not indices:
            raise TraceError(
                "no output of the model depends on a parameter that requires a gradient; is the "
                "model frozen, or does loss_outputs return other tensors?"
            )
        return indices

    def _around(
        self,
        step: CapturedStep,
        device: torch.device,
        costs: CostModel,
        buckets: Buckets | None,
        *,
        held_bytes: int,
    ) -> tuple[Callable[[Graph], Graph], tuple[str, ...]]:
        """What puts the loss, the optimizers and the buckets around a module's graph, and notes."""
        notes = list(step.graph.meta.notes)
        loss_bytes: int | None = None
        outputs = [step.captured.outputs[i].meta["val"] for i in step.captured.gradient_outputs]
        returns_loss = len(outputs) == 1 and outputs[0].numel() == 1
        if not returns_loss or self.options.loss_outputs is not None:
            if self.options.loss_reserve is not None:
                loss_bytes = size_on(device, self.options.loss_reserve, what="loss_reserve")
            else:  # a float32 copy for logarithms and one for their gradient; 16 bits: also a cast
                loss_bytes = sum(
                    t.numel() * 4 * (2 if t.element_size() >= 4 else 3) for t in outputs
                )
            notes.append(
                f"the loss is computed outside of the model; {format_both(loss_bytes)} are "
                "reserved for it besides its inputs and their gradients (or loss_reserve=)"
            )
        figures = [
            optimizer_costs(each, self._model, device=device, costs=costs)
            for each in self._optimizers
        ]
        if not self._optimizers:
            notes.append("the optimizer's state is not counted: pass optimizer= to count it")
            if not self.plans:
                warnings.warn(f"fit: {notes[-1]}", stacklevel=2)
        if buckets is not None and buckets.separate_bytes:
            notes.append(
                f"DistributedDataParallel's buckets take {format_both(buckets.size_bytes)}; with "
                "gradient_as_bucket_view=True the gradients would live in them"
            )

        def around(graph: Graph) -> Graph:
            if loss_bytes is not None:
                graph = with_unknown_loss(graph, workspace_bytes=loss_bytes)
            graph = with_optimizer(graph, together(figures))
            if buckets is not None and buckets.separate_bytes:
                graph = with_resident(graph, "gradient_buckets", buckets.separate_bytes)
            return with_resident(graph, "kept_to_run_again", held_bytes)

        return around, tuple(notes)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers that other libraries put around it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer is an object of type {type(optimizer).__name__}; pass the "
            "torch.optim.Optimizer that trains the model, or a list of several"
        )
    return optimizer
