"""Planned steps that are recorded as CUDA graphs."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import scheduler_runtime
from benchmarks.gpu.bench import free_unreferenced
from benchmarks.gpu.bits import tight_plan
from benchmarks.same_bits import solution_of
from benchmarks.zoo import tiny
from graphs.trace import trace
from scheduler_runtime.verifying import differences
from solver import Compute, solve
from solver.schedule import baseline, keep


def without_dropout(device: torch.device) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, batch


def clear_gradients(*models: nn.Module) -> None:
    for model in models:
        for parameter in model.parameters():
            parameter.grad = None


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


def test_a_recorded_step_has_eager_modes_gradients(cuda, finding):
    """The first batch is not overwritten; gradients from before the step are refused."""
    model, batch = without_dropout(cuda)
    plain = copy.deepcopy(model)
    scheduler_runtime.apply(model, tight_plan(model, batch), cuda_graph=True)
    first = batch[0].clone()
    for shift in range(3):
        clear_gradients(plain, model)
        for each in (plain, model):
            each(*((t + shift) % 128 for t in batch)).backward()
        off = largest_difference(plain, model)
        finding(f"gradients differ by at most {off:.2g}")
        assert off < 1e-3
    assert torch.equal(first, batch[0])
    with pytest.raises(scheduler_runtime.CudaGraphError):
        model(*batch)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_recorded_dropout_draws_the_plans_numbers(cuda, recomputes, finding):
    """Other numbers in each step, the seed's numbers in each run; also where random operators are
    recomputed, and where a step draws between forward and backward pass."""
    model, batch = tiny("gpt2 with dropout", cuda).model_and_batch(cuda)
    planned = copy.deepcopy(model)
    graph = trace(model, batch)
    plan = solution_of(graph, keep(graph, ()) if recomputes else baseline(graph))
    scheduler_runtime.apply(model, plan, cuda_graph=True)
    scheduler_runtime.apply(planned, plan)
    for each in (model, planned):  # the first call plans and records
        each(*batch).backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    runs: list[list[Any]] = []
    for each in (model, planned, planned):
        torch.manual_seed(3)
        runs.append([])
        for _ in range(3):
            clear_gradients(each)
            loss = each(*batch)
            torch.rand(8, device=cuda)
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in each.named_parameters()}
            runs[-1].append({"loss": loss.detach().clone(), **gradients})
    recorded, expected, second = runs
    assert len({float(step["loss"]) for step in recorded}) == 3
    for one, other, again in zip(recorded, expected, second, strict=True):
        assert differences(other, one).keys() <= differences(other, again).keys()
    runs_of = Counter(op.node for op in plan.schedule.ops if isinstance(op, Compute))
    forward = [node for node in graph.nodes if node.phase == "forward"]
    random = [node for node in forward if "dropout" in node.op or "attention" in node.op]
    n_again = sum(runs_of[node.name] - 1 for node in random)
    assert (n_again > 0) == recomputes
    finding(f"{n_again} runs of random operators again")


def test_a_step_under_autocast_is_recorded(cuda, finding):
    model, batch = without_dropout(cuda)
    plain = copy.deepcopy(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        scheduler_runtime.apply(model, tight_plan(model, batch), cuda_graph=True)
        losses = [each(*batch) for each in (model, plain)]
    for loss in losses:
        loss.backward()
    off = largest_difference(plain, model)
    finding(f"gradients differ by at most {off:.2g}")
    assert off < 1e-2


def test_recordings_of_two_shapes_share_memory(cuda, finding):
    """A smaller batch after a larger one is recorded in the same memory."""
    model, batch = without_dropout(cuda)
    smaller = tuple(t[: len(t) // 2] for t in batch)
    plans = [solve(model, each, budget="100GB", reserve=0) for each in (batch, smaller)]
    scheduler_runtime.apply(model, plans, cuda_graph=True)
    reserved = []
    for each in (batch, smaller, batch):
        clear_gradients(model)
        model(*each).backward()
        free_unreferenced(cuda)
        reserved.append(torch.cuda.memory_reserved(cuda))
    finding(f"reserved after each {reserved}")
    assert reserved[1] < 1.25 * reserved[0]
