"""A plan for fresh gradients in a step that has some already: one warning with the excess."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from scheduler_runtime import apply
from solver import solve
from solver.schedule import Solution
from solver.sizes_deadlines_progress import format_size_up

GRADIENT_BYTES = 4 * (64 * 64 + 64) * 4


def loss(output: torch.Tensor, _batch: object) -> torch.Tensor:
    return output.square().mean()


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(128, 64)


def planned(budget: float | str, gradients: str = "fresh") -> Solution:
    model, x = made()
    return solve(model, (x,), budget=budget, loss=loss, gradients=gradients)


def accumulate(plan: Solution | Path, n: int = 3) -> None:
    model, x = made()
    apply(model, plan)
    for _ in range(n):
        loss(model(x), x).backward()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.endswith("existing_gradients")]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("from_file", [False, True])
def test_the_first_call_with_gradients_warns_once_by_how_much(
    from_file: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    free = planned("1GB").simulation
    solution = planned(f"{free.peak_bytes}B")
    plan: Solution | Path = solution
    if from_file:
        plan = tmp_path / "schedule.json"
        solution.save(plan)
    accumulate(plan, n=1)
    assert told(caplog) == []
    accumulate(plan)
    (text,) = told(caplog)
    peak = solution.simulation
    excess = peak.peak_bytes + GRADIENT_BYTES - solution.request.available_bytes
    assert 0 < excess <= GRADIENT_BYTES
    assert f"gradients of {format_size_up(GRADIENT_BYTES)}," in text
    assert f"up to {format_size_up(excess)} more than the budget" in text
    assert 'solve(..., gradients="accumulate")' in text
    assert "--accumulate" in text
    assert "fit" in text


@pytest.mark.slow
def test_a_budget_with_room_and_a_plan_for_accumulation_are_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accumulate(planned("1GB"))
    accumulate(planned("1GB", gradients="accumulate"))
    assert told(caplog) == []
