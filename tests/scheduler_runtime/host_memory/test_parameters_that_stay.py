"""Parameters that a plan leaves on the device, because they cannot be copied as one block."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from checkpoint_solver import apply, solve
from graphs.host_state import parameter_loads, parameters_on_host
from solver.sizes_deadlines_progress import BudgetError
from tests.scheduler_runtime.host_memory.test_planned_host_state import HOST, alike


class Images(nn.Module):
    """A convolution in channels last, and a weight that is part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(8, 32, 3, padding=1).to(memory_format=torch.channels_last)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.part = nn.Parameter(torch.randn(48, 32)[:32])
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3))
        return self.head(torch.tanh(h @ self.part)).square().mean()


@pytest.mark.slow
def test_parameters_that_do_not_fill_their_storage_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_loads, "LEAST_BYTES", 1024)
    x = torch.randn(2, 8, 6, 6)
    plain, model = Images(), Images()
    without, optimizer = optim.AdamW(plain.parameters()), optim.AdamW(model.parameters())
    solution = solve(model, x, budget="1GB", optimizer=optimizer, parameters="host", **HOST)
    on_host = parameters_on_host(solution.graph.meta.environment)
    assert set(on_host) == {"second.weight", "head.weight"}
    apply(model, solution, optimizer=optimizer)
    for net, own in ((plain, without), (model, optimizer)):
        for _ in range(2):
            own.zero_grad()
            net(x).backward()
            own.step()
    assert alike(plain.state_dict(), model.state_dict())


@pytest.mark.slow
def test_if_all_parameters_stay_the_error_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_loads, "LEAST_BYTES", 1024)
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Tanh()).to(memory_format=torch.channels_last)
    optimizer = optim.AdamW(model.parameters())
    options = {"budget": "1GB", "optimizer": optimizer, "parameters": "host", **HOST}
    with pytest.raises(BudgetError, match="not contiguous"):
        solve(model, torch.randn(2, 8, 6, 6), loss=lambda out, _: out.sum(), **options)
