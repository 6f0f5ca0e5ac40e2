"""`on_pressure="replan"` with host memory: bits, and what all plans take of the host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.training_step import state_buckets
from scheduler_runtime import fit, plans_of
from scheduler_runtime.host_memory import host_blocks
from tests.support.bitwise import assert_equal
from tests.support.full_device import FailingOperators

N_ROWS, WIDTH = 256, 64
IN_FORWARD, IN_BACKWARD = 20, 30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(("state", "host_bytes"), [("auto", 400_000), ("host", 600_000)])
def test_tighter_plans_share_the_host(
    state: str, host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto", plans that copy to the host come before one for which the state would move."""
    monkeypatch.setattr(state_buckets, "LEAST_BUCKET_BYTES", 1)
    x = torch.randn(N_ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    plain, model = Net(), Net()
    without, optimizer = (torch.optim.AdamW(each.parameters()) for each in (plain, model))
    options = {"host_budget": host_bytes, "host_link": "100GB/s", "optimizer_state": state}
    fit(model, budget="1.6MB", optimizer=optimizer, on_pressure="replan", **options)
    for fails_at in ([], [IN_FORWARD], *[[IN_BACKWARD]] * 4, []):
        for net, own, at in ((plain, without, []), (model, optimizer, fails_at)):
            own.zero_grad()
            with FailingOperators(at) as failing:
                net(x).backward()
            assert failing.n_raised == len(at)
            own.step()
        of_state = sum(block.nbytes for block in host_blocks(optimizer))
        solutions = [each.solution for each in plans_of(model)]
        of_copies = max(s.simulation.host_peak_bytes - s.graph.host_state_bytes for s in solutions)
        assert of_state + of_copies <= host_bytes
    assert_equal(plain.parameters(), model.parameters())
    assert len(plans_of(model)) > 3
