"""Plan a module with one line: the plan is made at the first forward pass of the training.

    fit(model, budget="16GB", optimizer=optimizer)      # train as before
    remove(model)                                       # restores the module's own forward

At its first call, the module is traced with the real batch, planned and run. A call of another kind
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
from graphs.training_step import is_optimizer_factory, read_optimizer
from scheduler_runtime.execute import ReplacedForward, has_checkpoints
from scheduler_runtime.fitting.forward import FittedForward
from scheduler_runtime.fitting.held_optimizers import HeldOptimizers
from scheduler_runtime.fitting.options import FitError, Fitted, Optimizers, Options
from scheduler_runtime.fitting.unplanned import UncalledWatch
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
from solver.solving import check_where, with_disk


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

    If forward returns the loss (a scalar, `.loss`, or the only scalar of a tuple), that is
    differentiated. Otherwise, all floating-point outputs that require a gradient are expected to
    receive one from a loss outside of the model. If gradients arrive for other outputs, the step
    runs again with a plan for these, and later calls are planned for them from the start. If two
    losses take turns, each step after a change runs its forward pass twice.

    budget: bytes of the device for the whole step, "16GB"; "auto": what is free on the CUDA device
        at the first forward pass, plus what the step itself occupies there.
    optimizer: the one that trains the model, or several, in any form that `solve` accepts; their
        state and their step are counted.
    reserve: bytes of the budget that the step may not use (default: CUDA_RESERVE_BYTES on CUDA,
        else 0).
    loss_reserve: bytes that a loss outside of the model takes besides the outputs that it reads and
        their gradients, targets included. Default: in the first step, five times these outputs in
        32 bits if that fits, else twice (docs/bytes.md). The first step shows what the loss takes,
        and later plans count that; if the step exceeds the budget because of the loss, it warns.
        Up to twice the outputs in 32 bits are counted for the whole step: targets, and what the
        value of the loss keeps. If they do not fit, they are left out with a UserWarning.
    loss_outputs: a function of the output that returns the tensors from which a loss outside of the
        model is computed (`lambda output: output.logits`). None: all outputs.
    method, time_limit_s, seed, rewrites: as in `solver.solve`, for each plan.
    costs: seconds and workspace of each operator (default: as in `graphs.trace.trace`).
    host_budget, host_link: host memory that the plans may copy to, and the speed of copies, as in
        `solver.solve`. It is the limit for one forward pass with its backward pass, and all plans
        share it. If several passes are in flight, each may use as much, and so may each process.
    disk_budget, disk_rate: a disk for copies from the host, with a directory ("500GB:/scratch"), as
        in `solver.solve`; shared in the same way. A step whose disk is full or gone raises
        CopyError; a step whose disk fails runs again without it if possible (docs/copies.md).
    optimizer_state: as in `solver.solve`. The state can be on the host only if `optimizer` is a
        single optimizer object; it moves there when the first such plan is made.
    unplanned: what to do if gradients reach the model before it was called in training mode, so
        that nothing is planned: "warn" (UserWarning) or "error" (FitError), at the end of that
        backward pass. If the training does not call the model but a part of it that holds
        everything that is trained, that part is planned; parameters and buffers outside of it are
        counted.
    on_pressure: what to do if memory runs out in the forward or backward pass of a step: "raise"
        the error, or "replan": run the step again with a tighter plan, with bitwise identical
        results, and use that for later steps, too, until some of them had no shortage. For that,
        each step keeps the gradients of the outputs to its end, and copies of the buffers that it
        changes. `attempt` does the same for a loss outside of the model.
    passes: how many forward passes wait for one backward pass together (contrastive losses, DPO, a
        discriminator). Default: as many as a step has shown. The first step with more passes may
        exceed the budget, with a UserWarning; the next step is planned for them.

    Raises TypeError if `model` is not a module; ValueError for invalid options and for a module
    that has a plan; FitError for one that is compiled or wrapped; CheckpointedAlreadyError for one
    that uses activation checkpointing. The first forward pass raises TraceError if it cannot be
    traced, and FitError if nothing fits.
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
    elif not torch.cuda.is_available():  # otherwise the model may still be moved to a CUDA device
        refuse_auto_budget(device)
    places = host_for(model, host_budget, host_link, None)
    places = with_disk(places, disk_budget, disk_rate)
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
    if len(optimizers) != 1 or is_optimizer_factory(several[0]):
        # to move the state, the step of the one optimizer object is replaced
        if optimizer_state == "host":
            raise ValueError(
                "optimizer_state is 'host', for which fit needs the optimizer that trains the "
                "model, and no other: fit(model, optimizer=optimizer, ...)"
            )
        options = dataclasses.replace(options, optimizer_state="device")
    inner: list[FittedForward] = []
    held = HeldOptimizers(optimizers)
    for each in (*_parts_with_all_trained(model), model):
        each.forward = FittedForward(each, options, held, whole=model, parts=inner)
        inner.append(each.forward)
    watch = UncalledWatch(model, UNPLANNED[unplanned])
    for forward in inner:
        forward.watch = watch
    return model


def plan_ahead(model: nn.Module, calls: Iterable[Any]) -> tuple[Fitted, ...]:
    """Plan for the shapes of these batches before the training meets them; returns all plans.

    The plans are for steps as they would run now: under the current autocast, with the gradients
    and buffers that exist (load a checkpoint before). They share the budget of `fit`. Nothing is
    run.

    calls: what the model will be called with, one batch of each shape (bucket): a tensor for
        model(x), a tuple for model(*x), a dict for model(**x). Values only matter if forward reads
        them. The largest batch is planned first; its plan is reused for smaller ones without a
        search.

    Raises ValueError for a module without `fit`, or not in training mode, and for a single batch
    instead of a list; and whatever the first forward pass raises.
    """
    plans_of(model)
    if isinstance(calls, torch.Tensor | Mapping):  # its rows or keys would be taken for batches
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
    """The plans made so far, oldest first. Raises ValueError for a module without `fit`."""
    fitted = model.__dict__.get("forward")
    if not isinstance(fitted, FittedForward):
        raise ValueError("fit was not called on this module")
    return fitted.plans


def _raise(words: str) -> NoReturn:
    raise FitError(words)


ON_PRESSURE = ("raise", "replan")
UNPLANNED: dict[str, Callable[[str], None]] = {"warn": warn, "error": _raise}


def _parts_with_all_trained(model: nn.Module) -> list[nn.Module]:
    """The submodules that hold all trainable parameters and can be called, innermost first."""
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
