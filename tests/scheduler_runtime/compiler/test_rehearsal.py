"""What is measured before a compiled step is used: the bytes of the whole training step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler_runtime import compile, compile_reports
from scheduler_runtime.compiler.rehearsal import Rehearsal


def test_what_only_the_loss_reads_counts() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(2, 4), torch.randn(1000, 4))
    compile(
        model,
        batch,
        budget="1GB",
        backend="aot_eager",
        inputs=lambda batch: (batch[0],),
        loss=lambda output, batch: (output - batch[1][:2]).square().mean(),
    )
    (report,) = compile_reports(model)
    assert report.chosen.measured_bytes is not None
    assert report.chosen.measured_bytes >= batch[1].nbytes
    assert report.optimizer_peak_bytes >= batch[1].nbytes


class MomentumEncoder(nn.Module):
    """Its forward pass averages the trained layer into a frozen one, as BYOL and MoCo do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.online, self.target = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)

    @torch.no_grad()
    def average(self) -> None:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            if self.how == "in place":
                target.mul_(0.9).add_(online, alpha=0.1)
            else:
                target.data = target.data * 0.9 + online.data * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average()
        return (self.online(x) - self.target(x)).square().mean()


@pytest.mark.parametrize("how", ["in place", "data"])
def test_parameters_that_forward_changes_are_restored(how: str) -> None:
    model, x = MomentumEncoder(how), torch.randn(8, 16)
    before = [parameter.clone() for parameter in model.parameters()]
    Rehearsal(model, (x,), {}, None, None, (), 0).peak_bytes(model.forward)
    assert all(map(torch.equal, model.parameters(), before))
