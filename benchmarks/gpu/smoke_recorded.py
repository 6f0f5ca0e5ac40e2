"""Checks of steps that are recorded as CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import scheduler_runtime
from benchmarks.gpu.bench import emptied
from benchmarks.gpu.smoke_checks import made, tight
from benchmarks.gpu.smoke_device import NEEDS_CUDA, Bench, must
from solver import solve


def _without_dropout(bench: Bench) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model, batch = made("gpt2 with dropout", bench)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, batch


def _cleared(*models: nn.Module) -> None:
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None


def _apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def recorded_steps_have_the_same_gradients(bench: Bench) -> str:
    """Three batches: the first is not written over, and gradients that are there are refused."""
    if not bench.on_cuda:
        return NEEDS_CUDA
    model, batch = _without_dropout(bench)
    twin = copy.deepcopy(model)
    scheduler_runtime.apply(model, tight(model, batch), cuda_graph=True)
    batches = [batch, *(tuple((t + i) % 128 for t in batch) for i in (1, 2))]
    first = batch[0].clone()
    worst = 0.0
    for each in batches:
        _cleared(twin, model)
        for other in (twin, model):
            other(*each).backward()
        worst = max(worst, _apart(twin, model))
    must(torch.equal(first, batch[0]), "the first batch was written over")
    must(worst < 1e-3, f"gradients are up to {worst} apart")
    try:
        model(*batch)
    except scheduler_runtime.CudaGraphError:
        return f"gradients up to {worst:.2g} apart"
    raise AssertionError("a step with gradients that are there was not refused")


def recorded_dropout_draws_what_the_plan_draws(bench: Bench) -> str:
    """A plan that keeps everything: other numbers in each step, those of the seed in each."""
    if not bench.on_cuda:
        return NEEDS_CUDA
    model, batch = made("gpt2 with dropout", bench)
    twin = copy.deepcopy(model)
    plan = solve(model, batch, budget="100GB", reserve=0)
    scheduler_runtime.apply(model, plan, cuda_graph=True)
    scheduler_runtime.apply(twin, plan)
    for each in (model, twin):  # planned, recorded
        each(*batch).backward()
    losses: list[list[float]] = []
    for each in (model, twin):
        torch.manual_seed(3)
        found = []
        for _ in range(3):
            _cleared(each)
            loss = each(*batch)
            loss.backward()
            found.append(float(loss))
        losses.append(found)
    must(len(set(losses[0])) == 3, f"losses {losses[0]}")
    must(losses[0] == losses[1], f"losses {losses[0]}, not recorded {losses[1]}")
    return f"losses {losses[0]}"


def recorded_under_autocast(bench: Bench) -> str:
    if not bench.on_cuda:
        return NEEDS_CUDA
    model, batch = _without_dropout(bench)
    twin = copy.deepcopy(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scheduler_runtime.apply(model, tight(model, batch), cuda_graph=True)
        losses = [each(*batch) for each in (model, twin)]
    for loss in losses:
        loss.backward()
    apart = _apart(twin, model)
    must(apart < 1e-2, f"gradients are up to {apart} apart")
    return f"gradients up to {apart:.2g} apart"


def recorded_shapes_share_memory(bench: Bench) -> str:
    """A smaller batch after a larger one: its recording is to find room in the same memory."""
    if not bench.on_cuda:
        return NEEDS_CUDA
    model, batch = _without_dropout(bench)
    smaller = tuple(t[: len(t) // 2] for t in batch)
    plans = [solve(model, each, budget="100GB", reserve=0) for each in (batch, smaller)]
    scheduler_runtime.apply(model, plans, cuda_graph=True)
    reserved = []
    for each in (batch, smaller, batch):
        _cleared(model)
        model(*each).backward()
        emptied(bench.device)
        reserved.append(torch.cuda.memory_reserved(bench.device))
    must(reserved[1] < 1.25 * reserved[0], f"reserved {reserved}")
    return f"reserved after each {reserved}"


RECORDED: tuple[Callable[[Bench], str], ...] = (
    recorded_steps_have_the_same_gradients,
    recorded_dropout_draws_what_the_plan_draws,
    recorded_under_autocast,
    recorded_shapes_share_memory,
)
