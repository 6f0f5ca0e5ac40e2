"""Rows that forward assigns: what a functional copy takes besides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from scheduler_runtime import apply, measure
from solver import solve


def _other_rows(h: torch.Tensor) -> torch.Tensor:
    h[:100] = h[100:200] * 2
    return h


def _columns(h: torch.Tensor) -> torch.Tensor:
    h[:, :64] = h[:, 64:] * 2
    return h


def _rows_and_columns(h: torch.Tensor) -> torch.Tensor:
    h[:100, :64] = h[100:200, 64:] * 2
    return h


def _one_column_of_rows(h: torch.Tensor) -> torch.Tensor:
    h[:100, 0] = h[100:200, 1] * 2
    return h


def _diagonal(h: torch.Tensor) -> torch.Tensor:
    h[:1000].diagonal().copy_(h[1000:1128, 0])
    return h


class Assigns(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        return second(self.write(first(x) * 1.0)).square().sum()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "write", [_other_rows, _columns, _rows_and_columns, _one_column_of_rows, _diagonal]
)
def test_the_peak_of_a_plan_is_the_predicted_one(
    write: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model, x = Assigns(write), torch.randn(2048, 128)
    solution = solve(model, x, budget="1GB", rewrites="none")
    apply(model, solution)
    assert measure(model, x, n_steps=1).peak_bytes == solution.simulation.peak_bytes
