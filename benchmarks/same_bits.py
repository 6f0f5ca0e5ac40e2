"""Train a model with and without a plan, compare bitwise, and measure the memory of a step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.step_styles import Seen, Style, Training
from benchmarks.zoo import Entry
from graphs.graph import Graph
from scheduler_runtime import apply
from scheduler_runtime.measuring import absolute_peak_bytes, resident_tensors
from scheduler_runtime.verifying import differences
from solver.schedule import Request, Schedule, Solution, baseline, keep, simulate

N_STEPS = 3
RATE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """How training with a plan compares with training without one.

    differences: what is not bitwise identical, in words (empty: everything is).
    n_compared: number of tensors that were compared.
    measured_peak_bytes: peak of the last step with the plan, resident bytes included.
    """

    differences: tuple[str, ...]
    n_compared: int
    measured_peak_bytes: int


def trained(training: Training, style: Style, *, measure: bool = False) -> tuple[list[Seen], int]:
    """Train N_STEPS steps. Returns, for each step, what it showed (`Training.seen`) and the state
    after it (`_state_after_step`), and the peak bytes of the last step.

    measure: measure the peak (else it is 0).
    """
    if not style.steps_inside:
        training.optimizer = torch.optim.AdamW(
            (p for p in training.model.parameters() if p.requires_grad), lr=RATE
        )
    if style.set_up is not None:
        style.set_up(training)
    shown: list[Seen] = []
    peak_bytes = 0
    for index in range(N_STEPS):
        # The last step, which a profiler watches, draws as the first. LayerDrop needs no new plan,
        # for which parts that are not traced would be measured with a profiler of their own.
        torch.manual_seed(index % (N_STEPS - 1))
        training.seen = {}
        if measure and index == N_STEPS - 1:
            if style.gradients == "fresh":
                training.zero_grad()
            gc.collect()
            optimizers = () if training.optimizer is None else (training.optimizer,)
            resident = resident_tensors(training.model, training.batch, optimizers)
            peak_bytes = absolute_peak_bytes(
                lambda: style.step(training), torch.device("cpu"), resident
            )
        else:
            style.step(training)
        training.output = None
        shown.append({**training.seen, **_state_after_step(training)})
    return shown, peak_bytes


def compare(
    model: nn.Module,
    batch: Any,
    entry: Entry,
    style: Style,
    solution: Solution,
    *,
    expected: list[Seen],
) -> Comparison:
    """Train a copy of the model with the plan, and compare the results with `expected`, those of
    `trained` without a plan."""
    planned = apply(copy.deepcopy(model), solution)
    training = Training(planned, copy.deepcopy(batch), entry)
    shown, peak_bytes = trained(training, style, measure=True)
    return Comparison(between(expected, shown), sum(map(len, expected)), peak_bytes)


def between(expected: Sequence[Seen], shown: Sequence[Seen]) -> tuple[str, ...]:
    """The differences between the results of two trainings, step by step, in words."""
    return tuple(
        f"step {index}: {difference}"
        for index, (one, other) in enumerate(zip(expected, shown, strict=True))
        for difference in differences(one, other).values()
    )


def _state_after_step(training: Training) -> Seen:
    """Copies of parameters, buffers, gradients (also those of the batch) and the random state."""
    state: Seen = {"random state": torch.get_rng_state()}
    device = next(training.model.parameters()).device
    if device.type == "cuda":
        state["random state of the device"] = torch.cuda.get_rng_state(device)
    for name, parameter in training.model.named_parameters():
        state[f"parameter {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            state[f"gradient of {name}"] = parameter.grad.clone()
    for name, buffer in training.model.named_buffers():
        state[f"buffer {name}"] = buffer.clone()
    for index, tensor in enumerate(pytree.tree_leaves(training.batch)):
        if isinstance(tensor, torch.Tensor) and tensor.grad is not None:
            state[f"gradient of tensor {index} of the batch"] = tensor.grad.clone()
    return state


def solution_of(graph: Graph, schedule: Schedule) -> Solution:
    """A Solution with this schedule, for a budget that both the schedule and the plain step fit."""
    plain, planned = simulate(graph, baseline(graph)), simulate(graph, schedule)
    request = Request(max(plain.peak_bytes, planned.peak_bytes))
    return Solution(
        "feasible", graph, schedule, planned, request, plain, plain.time_s, "given", 0.0
    )


def keeping_nothing(graph: Graph) -> Solution:
    """A Solution whose schedule saves nothing for backward that can be recomputed."""
    return solution_of(graph, keep(graph, set()))
