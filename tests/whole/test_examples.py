"""The main job on every example: the measured step stays inside the budget, to the bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from graphs.costs.models import Cost, Measured, OpCall, Roofline, flops_of
from graphs.costs.operators import FLOPS
from graphs.graph import Graph
from graphs.hardware import named
from graphs.model_calls.call import Call, as_call
from graphs.trace import loss_index, trace, trace_module
from scheduler_runtime import apply
from scheduler_runtime.measuring import measure
from solver import split_pipeline
from solver.schedule.solution import Request, Solution
from solver.solving import answer
from tests.support.bitwise import assert_equal, one_step
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.example_models import EXAMPLES, SIZES, load, optimizer_of, small

MIB = 2**20
SHARES = (0.7, 0.85, 1.0)
"""Budgets: resident, and this much of what the baseline's peak has above it."""


class MeasuredWorkspace:
    """Workspace as measured here (conv nets take some inside operators), times by the roofline:
    measured times would make another plan at every run of the tests."""

    def __init__(self) -> None:
        self._measured = Measured("cpu", n_runs=1)
        self._roofline = Roofline(named("cpu"))

    @property
    def description(self) -> Mapping[str, Any]:
        return self._measured.description

    def cost(self, call: OpCall) -> Cost:
        workspace_bytes = self._measured.cost(call).workspace_bytes
        return Cost(self._roofline.cost(call).time_s, workspace_bytes)


@functools.cache
def measured_graph(name: str) -> Graph:
    model, batch = small(name)
    return trace(model, batch, optimizer=optimizer_of(name, model), costs=MeasuredWorkspace())


@functools.cache
def solution(name: str, share: float) -> Solution:
    graph = measured_graph(name)
    budget = budget_above_resident(graph, share)
    found = answer(graph, Request(budget, method="auto", time_limit_s=600))
    assert found.schedule is not None, f"{name} at {share}: {found.status}"
    return found


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", SIZES)
def test_the_plain_step_takes_what_the_baseline_says(name: str) -> None:
    model, batch = small(name)
    graph = measured_graph(name)
    taken = measure(model, batch, optimizer=optimizer_of(name, model), n_steps=1)
    difference = abs(taken.peak_bytes - baseline_peak_bytes(graph))
    assert difference <= max(MIB, 0.02 * taken.peak_bytes)


@pytest.mark.slow(sample=1, keep=4)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_the_same_bits_within_the_budget(name: str, share: float) -> None:
    found = solution(name, share)
    plain, batch = small(name)
    planned = apply(copy.deepcopy(plain), found)
    for seed in range(2):
        plain.zero_grad()
        planned.zero_grad()
        assert_equal(one_step(plain, batch, seed), one_step(planned, batch, seed))
    planned.zero_grad()
    taken = measure(planned, batch, optimizer=optimizer_of(name, planned), n_steps=1)
    assert taken.peak_bytes <= found.request.budget_bytes
    difference = abs(taken.peak_bytes - found.simulation.peak_bytes)
    assert difference <= max(MIB, 0.02 * taken.peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet50", "lstm"])
def test_exactly_the_planned_operators_run_again(name: str) -> None:
    """FLOPs of the planned step = FLOPs of the plain one + those of what the plan runs again."""
    found = solution(name, SHARES[0])
    plain, batch = small(name)
    args, kwargs = as_call(batch)
    traced = trace_module(
        plain,
        Call.of(args, kwargs),
        device=torch.device("cpu"),
        choose=loss_index,
        gradients="fresh",
        costs=None,
    )
    flops = {n: flops_of(OpCall.from_node(node)) for n, node in traced.layout.calls.items()}
    order = found.schedule.order
    again = sum(flops.get(node, 0) * (order.count(node) - 1) for node in set(order))
    assert found.simulation.n_recomputed == len(order) - len(set(order)) > 0

    def counted(model: nn.Module) -> int:
        one_step(model, batch, 0)  # traces, so that the count below is of the step alone
        with FlopCounterMode(display=False, custom_mapping=dict(FLOPS)) as counter:
            one_step(model, batch, 0)
        return counter.get_total_flops()

    planned = apply(copy.deepcopy(plain), found)
    assert counted(planned) == counted(plain) + again


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_planning_the_full_size_allocates_no_weights(name: str) -> None:
    if name == "lstm":
        options: dict[str, Any] = {"seq_length": 30}  # tracing takes 0.1 s a step
    else:
        options = {}
    module = load(name)
    with torch.device("meta"):
        model = module.get_model(**({"n_layers": 4} if name == "llama" else {}))
        batch = module.get_batch(**options)
    graph = trace(model, batch)
    assert all(p.is_meta for p in model.parameters())
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(t.size_bytes for t in graph.tensors if t.kind == "parameter") == n_bytes


@pytest.mark.slow
def test_gpt2_takes_about_11_gb_without_checkpointing() -> None:
    module = load("gpt2")
    with torch.device("meta"):
        model, batch = module.get_model(), module.get_batch()
    graph = trace(model, batch, optimizer=torch.optim.AdamW(model.parameters()))
    assert 10.5e9 < baseline_peak_bytes(graph) < 11.5e9
    found = answer(graph, Request(budget_bytes=8 * 10**9))
    assert found.status == "optimal"
    assert found.simulation.peak_bytes <= 8 * 10**9


@pytest.mark.slow
def test_gpt2_as_layers_is_divided_and_each_stage_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`examples/gpt2_layers.py`, smaller: its blocks are those of `examples/gpt2.py`."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = load("gpt2_layers")
    with torch.device("meta"):
        layers = example.get_model(n_layers=3, width=64, n_heads=2, n_tokens=200, max_length=32)
        batch = example.get_batch(batch_size=2, seq_length=32, n_tokens=200)
    split = split_pipeline(
        layers,
        example.get_inputs(batch),
        target=batch,
        loss=example.get_loss,
        n_stages=2,
        n_microbatches=2,
        budget="1GB",
        optimizer=torch.optim.AdamW,
        quick=True,
    )
    assert split.fits
    assert sum(split.sizes) == len(layers) == 3 + 2
