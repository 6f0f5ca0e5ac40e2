"""The planned step under torch.compile: within its budget, bitwise identical."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import scheduler_runtime
from benchmarks.gpu.bits import TIME_LIMIT_S, compare
from benchmarks.zoo import tiny


def check_budget(device: torch.device, backend: str, finding: Callable[[object], None]) -> None:
    """Plan once without a limit, then for a fifth less than that saves; run the step."""
    model, batch = tiny("gpt2 with dropout", device).model_and_batch(device)
    options = {"reserve": 0, "backend": backend, "time_limit_s": TIME_LIMIT_S}
    scheduler_runtime.compile(model, batch, budget="100GB", **options)
    (report,) = scheduler_runtime.compile_reports(model)
    budget = (report.chosen.measured_bytes or 0) - int(0.2 * report.chosen.partition.saved_bytes)
    scheduler_runtime.uncompile(model)
    scheduler_runtime.compile(model, batch, budget=budget, max_attempts=3, **options)
    (report,) = scheduler_runtime.compile_reports(model)
    model(*batch).backward()
    finding(report)
    assert report.chosen.measured_bytes <= budget


@pytest.mark.slow
def test_a_step_compiled_operator_by_operator_keeps_its_budget(device, finding):
    check_budget(device, "aot_eager", finding)


def test_a_step_compiled_by_inductor_keeps_its_budget(cuda, finding):
    check_budget(cuda, "inductor", finding)


@pytest.mark.slow
def test_a_compiled_step_is_bitwise_identical(device, finding):
    row = compare("attention with dropout", "ours, compiled", device, backend="aot_eager")
    assert row["n_different"] == 0, row
    assert row["n_again"] > 0, "the plan recomputes nothing"
    finding(f"{row['n_compared']} tensors")
