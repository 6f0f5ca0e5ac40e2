"""A step that runs with and without its plan: what it says on the way and in the end."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scheduler_runtime import verify
from solver.solving import solve
from tests.scheduler_runtime.test_without_plan import STEPS, numbers


class _ReadsMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not bool(mask.all()):
            x = x * mask
        return self.layers(x).sum()


def test_a_batch_with_other_values_is_planned_once(caplog):
    x = torch.ones(4, 8)
    solution = solve(_ReadsMask(), (x, torch.ones(8)), budget="1GB")
    found = verify(solution, model=_ReadsMask, batch=lambda: (x, torch.zeros(8)))
    assert not found.differences
    (warned,) = [record for record in caplog.records if "Plan 2" in record.getMessage()]
    assert "mask has other values than when planned" in warned.getMessage()


@pytest.mark.slow
def test_verify_tells_a_baseline_that_is_not_the_predicted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    build, target = STEPS["square by hand"]
    model, batch = build(), (numbers(), target())
    given = {"model": lambda: copy.deepcopy(model), "batch": lambda: batch}
    solution = solve(model, batch, budget="1GB", optimizer=torch.optim.AdamW(model.parameters()))
    found = verify(solution, **given)
    assert found.passed
    assert found.warnings == ()
    monkeypatch.setattr(
        "graphs.graph.eager_memory.with_function_lifetimes", lambda nodes, *_, **__: tuple(nodes)
    )
    wrong = solve(model, batch, budget="1GB", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.warns(UserWarning, match="without the plan the measured peak is .* above"):
        assert len(verify(wrong, **given).warnings) == 1
