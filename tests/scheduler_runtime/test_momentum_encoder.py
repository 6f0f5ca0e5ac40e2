"""A frozen copy of an encoder that forward averages through `.data`, as MoCo's does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from scheduler_runtime.measuring import measure
from solver import solve
from tests.support.bitwise import assert_bitwise_identical


def encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 16))


class Momentum(nn.Module):
    def __init__(self, how: str = "average") -> None:
        super().__init__()
        self.query, self.key, self.how = encoder(), encoder().requires_grad_(False), how

    def forward(self, x: Tensor) -> Tensor:
        query = F.normalize(self.query(x), dim=1)
        if self.how == "read before":
            query = self.key(query)
        with torch.no_grad():
            for one, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.data = one.data if self.how == "shared" else 0.9 * other.data + 0.1 * one.data
            if self.how == "trained":
                self.query[0].weight.data = 0.9 * self.query[0].weight.data
            key = F.normalize(self.key(x), dim=1)
        return -(query * key).sum(1).mean()


def made(how: str = "average") -> tuple[Momentum, Tensor]:
    torch.manual_seed(0)
    return Momentum(how), torch.randn(32, 16)


@pytest.mark.slow
def test_the_least_budget_has_the_bits_of_plain_training() -> None:
    plain, batch = made()
    applied, fitted = copy.deepcopy(plain), copy.deepcopy(plain)
    least_bytes = solve(plain, batch, budget=1).minimum_budget_bytes
    assert least_bytes is not None
    apply(applied, solve(applied, batch, budget=least_bytes))
    fit(fitted, budget="1MB", optimizer=[])
    assert_bitwise_identical(copy.deepcopy(plain), applied, batch)
    assert_bitwise_identical(plain, fitted, batch)


def test_measured_peaks_do_not_count_the_weights_that_are_replaced() -> None:
    """The profiler sees the new weights; the old ones, from before it started, are freed."""
    model, batch = made()
    predicted = solve(model, batch, budget="1GB", optimizer=torch.optim.SGD).baseline.peak_bytes
    measured = measure(model, batch, optimizer=torch.optim.SGD, n_steps=1).peak_bytes
    assert abs(measured - predicted) < 500


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("shared", r"assigns to the \.data of a tensor"),  # a later step would change both
        ("trained", r"assigns to the \.data of a tensor"),
        ("read before", "modified by an inplace operation"),  # the old values are gone
    ],
)
def test_other_writes_to_data_are_refused(how: str, why: str) -> None:
    with pytest.raises(TraceError, match=why):
        trace(*made(how))


class Branching(nn.Module):
    """Cannot be traced, so it runs for real while it is planned, and the model around it too."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(16, 16), writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.layer.weight.clamp_(max=0.1)
        return self.layer(x if x.mean() < 10 else x / 2)


class AroundBranching(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.part = Branching(writes=how == "part")
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(how != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        if self.how != "part":
            with torch.no_grad():
                self.other.weight.mul_(0.9).add_(self.one.weight, alpha=0.1)
        return self.part(self.one(x) + self.other(x)).square().mean()


def test_planning_leaves_parameters_that_are_written_in_place() -> None:
    """A frozen parameter changes once in a step, and others not at all where they are refused."""
    torch.manual_seed(0)
    plain, batch = AroundBranching("frozen"), torch.randn(8, 16)
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    assert_bitwise_identical(plain, fitted, batch)
    for how in ("trained", "part"):
        model = AroundBranching(how)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(TraceError):
            fit(model, budget="1MB", optimizer=[])(batch)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
