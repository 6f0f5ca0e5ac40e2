"""`fit` with a disk that fails in the middle of a step, which runs again without it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import fit, plans_of
from scheduler_runtime.execute import Shortage
from scheduler_runtime.execute.spill_file import DiskError
from scheduler_runtime.fitting.step_to_plan import StepToPlan
from solver import solve
from tests.support.bitwise import assert_equal
from tests.support.failing_disk import failing_disk


class Net(nn.Module):
    """Blocks with dropout and batch norm, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(3))
        self.norm = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, norm, down in zip(self.up, self.norm, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(norm(up(x)))), 0.2)
        return x.square().mean()


BATCHES = [torch.randn(256, 16, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def budget(share: float) -> int:
    plain = solve(Net(), BATCHES[0], budget="1TB")
    resident_bytes = plain.graph.resident_bytes
    return int(resident_bytes + share * (plain.baseline.peak_bytes - resident_bytes))


def fitted(directory: Path, net: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
    host = {"host_budget": 80_000, "host_link": 1e14}
    disk = {"disk_budget": f"1GB:{directory}", "disk_rate": 1e14}
    options = {"time_limit_s": 6000, "reserve": 0, **host, **disk, **options}
    return fit(net(), budget=budget(0.7), optimizer=[], **options)


def first_micro_batch(model: nn.Module, start: dict[str, torch.Tensor]) -> None:
    """From the start."""
    model.load_state_dict(start)
    model.zero_grad()
    torch.manual_seed(1)
    model(BATCHES[0]).backward()


def state(model: nn.Module) -> list[torch.Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    of_model = [*gradients, *model.parameters(), *model.buffers()]
    return [each.detach().clone() for each in of_model] + [torch.get_rng_state()]


def second_micro_batch(model: nn.Module) -> list[torch.Tensor]:
    loss = model(BATCHES[1])
    loss.backward()
    return [loss.detach(), *state(model)]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_the_step_runs_again_wherever_the_disk_fails(
    call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = Net(), fitted(tmp_path)
    start = {name: each.clone() for name, each in plain.state_dict().items()}
    first_micro_batch(plain, start)
    expected = second_micro_batch(plain)
    first_micro_batch(model, start)
    with failing_disk(call) as disk:
        assert_equal(expected, second_micro_batch(model))
    assert disk.n > 2
    n_plans = len(plans_of(model))
    for fails_at in range(disk.n):
        first_micro_batch(model, start)
        caplog.clear()
        with failing_disk(call, fails_at), caplog.at_level(logging.WARNING):
            assert_equal(expected, second_micro_batch(model))
        assert "Input/output error" in caplog.text
        assert "The step runs again without the disk" in caplog.text
    more = plans_of(model)[n_plans:]
    assert len(more) in (1, 2)  # more room is left before gradients have left
    for plan in more:
        assert plan.solution.simulation.disk_peak_bytes == 0
        assert plan.solution.simulation.peak_bytes <= plan.solution.request.available_bytes


@pytest.mark.slow
def test_without_another_plan_all_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fitted(tmp_path)
    start = {name: each.clone() for name, each in model.state_dict().items()}
    model(BATCHES[0]).backward()
    monkeypatch.setattr(StepToPlan, "without_disk", lambda self, _: self.with_limit(1))
    first_micro_batch(model, start)
    before = state(model)
    with failing_disk("pwrite", 0), pytest.raises(DiskError, match="No gradient") as raised:
        second_micro_batch(model)
    assert raised.value.__notes__ == [
        "No plan without the disk was found, so the step cannot run again."
    ]
    assert_equal(before, state(model))


@pytest.mark.slow
def test_with_plans_for_less_memory(tmp_path: Path) -> None:
    """What runs a step to its end without the disk is none of them."""
    plain, model = Net(), fitted(tmp_path, on_pressure="replan")
    start = {name: each.clone() for name, each in plain.state_dict().items()}
    first_micro_batch(plain, start)
    expected = second_micro_batch(plain)
    first_micro_batch(model, start)
    with failing_disk("preadv", 1):
        assert_equal(expected, second_micro_batch(model))
    shortage = Shortage(torch.OutOfMemoryError("no memory"), "backward pass")
    for _, ladder in model.forward._programs.programs:
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            ladder.tighter(object(), shortage)


@pytest.mark.slow
def test_a_loss_outside_ends_the_step(tmp_path: Path) -> None:
    """The gradients that arrive are not held; what was there before is there again."""

    class Outside(Net):
        def forward(self, x: torch.Tensor) -> Any:
            for up, norm, down in zip(self.up, self.norm, self.down, strict=True):
                x = x + F.dropout(down(F.gelu(norm(up(x)))), 0.2)
            return x

    model = fitted(tmp_path, Outside)
    model(BATCHES[0]).square().mean().backward()
    before = state(model)
    with failing_disk("pwrite", 0), pytest.raises(DiskError, match="No gradient"):
        model(BATCHES[1]).square().mean().backward()
    assert_equal(before, state(model))
