"""Exports of models with dead code, whose operator calls no graph has but eager mode makes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphs.trace import trace
from scheduler_runtime.export import to_saved_tensors_hooks, to_torch_checkpoint
from scheduler_runtime.measuring import measure
from solver import solve
from tests.support.bitwise import assert_bitwise_identical
from tests.support.budgets import budget_above_resident


class Block(nn.Module):
    """Calls the operators whose results are saved for nothing as well, before and afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.up(x)
        hidden = self.up(self.norm(x))
        hidden[:1].tanh()
        hidden = hidden.tanh() * hidden.sigmoid()
        hidden.add(1.0).add_(1.0)
        if (mask == 0).any():
            hidden = hidden * mask
        return x + self.down(hidden)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x.add(1.0)
        for block in self.blocks:
            x.tanh()
            x = block(x, mask)
        return x.square().mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(128, 256)
    mask[0, :8] = 0
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(1)), mask


@pytest.mark.slow
def test_checkpoints_save_the_planned_calls() -> None:
    plain, model = Net(), Net()
    budget = budget_above_resident(trace(model, batch()), 0.7)
    solution = solve(model, batch(), budget=budget, rewrites="none", time_limit_s=5)
    exported = to_torch_checkpoint(model, solution, on_excess="least")
    assert any(module.mode == "selective" for module in exported.modules)
    measured_bytes = measure(copy.deepcopy(model), batch(), n_steps=1).peak_bytes
    assert abs(measured_bytes - exported.peak_bytes) <= 0.02 * measured_bytes
    assert_bitwise_identical(plain, model, batch())


@pytest.mark.slow
def test_hooks_copy_the_planned_calls() -> None:
    plain, model = Net(), Net()
    budget = budget_above_resident(trace(model, batch()), 0.6)
    host = {"host_budget": "1GB", "host_link": "1000GB/s"}
    solution = solve(model, batch(), budget=budget, rewrites="none", time_limit_s=5, **host)
    exported = to_saved_tensors_hooks(model, solution, on_excess="least")
    assert exported.storages
    assert_bitwise_identical(plain, model, batch())
