"""Plan a module with one line: the plan is made at the first forward pass of the training.

    fit(model, budget="16GB", optimizer=optimizer)      # train as before
    remove(model)                                       # restores the module's own forward

The module is traced with the batch that it is called with, planned and run. A call of another kind
(another shape, autocast, gradients that exist already) is planned when it comes, within the same
budget. `plans_of(model)` returns the plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from graphs.costs import CostModel
from graphs.graph import warn
from graphs.model_calls import as_call, device_of
from graphs.passes import Passes
from graphs.rewrites import check_word
from graphs.training_step import is_made_from, read_optimizer
from scheduler_runtime.execute import ReplacedForward, has_checkpoints
from scheduler_runtime.fitting.forward import FittedForward
from scheduler_runtime.fitting.held_optimizers import HeldOptimizers
from scheduler_runtime.fitting.options import FitError, Fitted, Optimizers, Options
from scheduler_runtime.fitting.unplanned import Watch
from scheduler_runtime.planned import check_module, refuse_second
from scheduler_runtime.surroundings import (
    budget_for,
    host_for,
    refuse_auto_budget,
    refuse_checkpointing,
    why_not_planned,
)
from solver.methods import METHODS
from solver.sizes_deadlines_progress import Rates, names_checked
from solver.solving import check_where, disk_behind


@names_checked
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
    host_budget: int | float | str | None = None,
    host_link: Rates | None = None,
    disk_budget: int | float | str | None = None,
    disk_rate: Rates | None = None,
    optimizer_state: str = "auto",
    unplanned: str = "warn",
    on_pressure: str = "raise",
    passes: int | None = None,
) -> nn.Module:
    """Plan the training step of `model` when it first runs; returns the same module.

    If forward returns the loss (a scalar, `.loss`, or the only scalar of a tuple), the loss is
    differentiated. Otherwise all floating-point outputs that require a gradient are expected to
    receive one from outside. Where the backward pass brings others, the step runs again with a plan
    for these, and later calls are planned for them from the start. Where two losses take turns,
    each step after a change runs its forward pass twice.

    budget: bytes of the device for the whole step, "16GB"; "auto": what is free on the CUDA device
        at the first forward pass, plus what the step itself occupies there.
    optimizer: the one that trains the model, or several, in a form that `solve` takes; their state
        and their step are counted.
    reserve: bytes of the budget that the step may not use (default: CUDA_RESERVE_BYTES on CUDA,
        else 0).
    loss_reserve: bytes that a loss outside takes besides the outputs that it reads and their
        gradients, targets included. Default: in the first step five times these outputs in 32 bits,
        where that fits, else twice (docs/bytes.md); what it takes is seen in that step and planned
        for from then on. A step that exceeds the budget for it is told in a UserWarning. Up to
        twice the outputs in 32 bits are of the whole step: targets, and what the loss's value
        keeps. Where these do not fit, they are left out with a UserWarning.
    loss_outputs: a function of the output: those of its tensors that the loss outside is computed
        from (`lambda output: output.logits`). None: all.
    method, time_limit_s, seed, rewrites: as in `solver.solve`, for each plan.
    costs: seconds and workspace of each operator (default: as in `graphs.trace.trace`).
    host_budget, host_link: host memory that the plans may copy to, and how fast, as in
        `solver.solve`. All plans share it: it is the most that one forward pass with its backward
        pass takes. Of several that are open at once each has as much, and so has each process.
    disk_budget, disk_rate: a disk behind the host, with a directory there ("500GB:/scratch"), as in
        `solver.solve`; shared in the same way. A step whose disk is full or gone raises CopyError;
        one whose disk fails runs again without it where that is possible (docs/copies.md).
    optimizer_state: as in `solver.solve`. It can be on the host where `optimizer` is one optimizer
        itself, and not its name or a function; it moves there when the first such plan is made.
    unplanned: what to do if gradients reach the model before it was called in training mode, so
        that nothing is planned: "warn" (UserWarning) or "error" (FitError), at the end of that
        backward pass. Where the training calls a part that holds all that is trained, and not the
        model itself, that part is planned; parameters and buffers outside of it are counted.
    on_pressure: what to do where memory runs short in the forward or backward pass of a step:
        "raise" the error, or "replan": the step runs again with a tighter plan, with the same bits,
        and so do later steps until memory has not been short for some. Each step keeps what it
        needs for that: the gradients of the outputs to its end, and copies of the buffers that it
        changes. `attempt` does the same for a loss outside.
    passes: how many forward passes wait for one backward pass together (contrastive losses, DPO, a
        discriminator). Default: the most that a step has shown. The first step with more of them
        may exceed the budget, which is told in a UserWarning; the next one is planned for them.

    Raises TypeError for what is no module; ValueError for invalid options and for a module that has
    a plan; FitError for one that is compiled or wrapped; CheckpointedAlreadyError for one that uses
    activation checkpointing. The first forward pass raises TraceError (it cannot be traced) and
    FitError (nothing fits).
    """
    check_module(model, "fit(model, budget=..., optimizer=optimizer)")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; one of {', '.join(METHODS)}")
    if host_budget is not None and not METHODS[method].takes_places:
        raise ValueError(f"method {method} copies nothing to the host; leave out host_budget")
    if unplanned not in UNPLANNED:
        raise ValueError(f"unplanned is {unplanned!r}; one of {', '.join(UNPLANNED)}")
    if on_pressure not in ON_PRESSURE:
        raise ValueError(f"on_pressure is {on_pressure!r}; one of {', '.join(ON_PRESSURE)}")
    device = device_of(model)
    if budget != "auto":
        budget_for(model, budget, reserve)
    elif not torch.cuda.is_available():  # with one, the model may still be moved there
        refuse_auto_budget(device)
    places = host_for(model, host_budget, host_link, None)
    places = disk_behind(places, disk_budget, disk_rate)
    directory = "" if places is None else places.disk_directory
    if disk_budget is not None and not directory:
        raise ValueError(
            f"disk_budget is {disk_budget!r}, and fit needs a directory on the disk: "
            "disk_budget='500GB:/scratch'"
        )
    if passes is not None and Passes(passes).n > 1 and host_budget is not None:
        raise ValueError(
            f"passes is {passes}, but a plan with copies to the host is for one forward pass at a "
            "time; leave out host_budget, or give passes=1"
        )
    refuse_second(model)
    reason = why_not_planned(model)
    if reason is not None:
        raise FitError(reason)
    refuse_checkpointing(model)
    check_where(optimizer_state, with_host=host_budget is not None)
    several: Any = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = () if optimizer is None else tuple(read_optimizer(o, model) for o in several)
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
        host_budget,
        host_link,
        disk_budget,
        disk_rate,
        optimizer_state,
        on_pressure,
        None if passes is None else Passes(passes).n,
    )
    if len(optimizers) != 1 or is_made_from(several[0]):
        # the state is moved by replacing the step of the one optimizer that trains the model
        if optimizer_state == "host":
            raise ValueError(
                "optimizer_state is 'host', for which fit needs the optimizer that trains the "
                "model, and no other: fit(model, optimizer=optimizer, ...)"
            )
        options = dataclasses.replace(options, optimizer_state="device")
    inner: list[FittedForward] = []
    held = HeldOptimizers(optimizers)
    for each in (*_parts_with_all(model), model):
        each.forward = FittedForward(each, options, held, whole=model, parts=inner)
        inner.append(each.forward)
    watch = Watch(model, UNPLANNED[unplanned])
    for forward in inner:
        forward.watch = watch
    return model


def plan_ahead(model: nn.Module, calls: Iterable[Any]) -> tuple[Fitted, ...]:
    """Plan for the shapes of these batches before the training meets them; returns all plans.

    calls: what the model is called with: a tensor as model(x), a tuple as model(*x), a dict as
        model(**x). One of each shape (bucket) that will come; values count only where forward reads
        them. The largest is planned first: its plan serves smaller ones without a search.

    Plans for a step as it would run now: in the ambient autocast, with the gradients that exist.
    All share the budget of `fit`. Nothing is run.

    Raises ValueError for a module that `fit` has not, or that is not in training mode, and for one
    batch instead of several; and what the first forward pass raises.
    """
    plans_of(model)
    if isinstance(calls, torch.Tensor | Mapping):  # else its rows or keys would be the batches
        raise ValueError(
            f"plan_ahead takes a list of batches, one of each shape, and was given one "
            f"{type(calls).__name__}: plan_ahead(model, [batch])"
        )
    if not model.training:
        raise ValueError("plan_ahead needs the model in training mode: call model.train()")
    forward: FittedForward = model.__dict__["forward"]
    given = [forward.call_of(*as_call(each, None)) for each in calls]
    for call in sorted(given, key=lambda call: -sum(t.numel() for t in call.tensors)):
        forward.plan_ahead(call)
    return plans_of(model)


def plans_of(model: nn.Module) -> tuple[Fitted, ...]:
    """The plans made so far, oldest first. Raises ValueError for a module that `fit` has not."""
    fitted = model.__dict__.get("forward")
    if not isinstance(fitted, FittedForward):
        raise ValueError("fit was not called on this module")
    return fitted.plans


def _refuse(words: str) -> NoReturn:
    raise FitError(words)


ON_PRESSURE = ("raise", "replan")
UNPLANNED: dict[str, Callable[[str], None]] = {"warn": warn, "error": _refuse}


def _parts_with_all(model: nn.Module) -> list[nn.Module]:
    """The submodules that hold every trainable parameter and can be called, innermost first."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    found = [
        each
        for each in model.modules()
        if each is not model
        and not isinstance(each, torch.jit.ScriptModule)
        and type(each).forward is not nn.Module.forward  # a ModuleList cannot be called
        and trained <= {id(p) for p in each.parameters()}
        and why_not_planned(each) is None
        and not isinstance(each.__dict__.get("forward"), ReplacedForward)
        and not has_checkpoints(each)
    ]
    return found[::-1] if trained else []
