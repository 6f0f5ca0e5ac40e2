"""A step that runs with and without its plan: what it says on the way."""

from __future__ import annotations

import torch
from torch import nn

from scheduler_runtime import verify
from solver.solving import solve


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
