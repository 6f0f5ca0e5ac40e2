"""`fit` with what is free on the device and with a tight budget; plans by submodules."""

from __future__ import annotations

import pytest
import torch

import scheduler_runtime
from benchmarks.gpu.bits import TIME_LIMIT_S, tight_plan
from benchmarks.zoo import tiny
from scheduler_runtime.by_submodule import plan_chain
from scheduler_runtime.measuring import free_unreferenced


@pytest.mark.slow
def test_fit_to_what_is_free(device, finding):
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    budget = "auto" if device.type == "cuda" else "1GB"
    scheduler_runtime.fit(model, budget=budget, optimizer=optimizer, time_limit_s=TIME_LIMIT_S)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        optimizer.step()
    (plan,) = scheduler_runtime.plans_of(model)
    finding(plan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fit_to_a_tight_budget(device, finding):
    model, batch = tiny("batch norm", device).model_and_batch(device)
    budget = tight_plan(model, batch).request.budget_bytes
    scheduler_runtime.fit(model, budget=budget, reserve=0, time_limit_s=TIME_LIMIT_S)
    model(*batch).backward()
    (plan,) = scheduler_runtime.plans_of(model)
    assert plan.solution is not None
    finding(repr(plan.solution))


def test_a_plan_by_submodules_sees_the_memory(device, finding):
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    plan = plan_chain(model, batch, budget="100GB")
    baseline_bytes = plan.baseline.peak_bytes
    assert baseline_bytes > plan.graph.resident_bytes
    finding(f"{len(plan.blocks)} submodules, peak without a plan {baseline_bytes}")
    if device.type == "cuda":
        for parameter in model.parameters():
            parameter.grad = None
        free_unreferenced(device)
        torch.cuda.reset_peak_memory_stats(device)
        model(*batch).backward()
        finding(f"measured {torch.cuda.max_memory_allocated(device)}")
