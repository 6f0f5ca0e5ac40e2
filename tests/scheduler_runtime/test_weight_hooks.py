"""torch.nn.utils.weight_norm and spectral_norm: their hooks are part of the planned step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scheduler_runtime import apply, fit
from solver import solve
from tests.support.bitwise import assert_bitwise_identical

NORMS: dict[str, Any] = {
    "weight norm": nn.utils.weight_norm,
    "spectral norm": nn.utils.spectral_norm,
}


class Critic(nn.Module):
    """Called twice in a step, so that spectral norm iterates twice."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            norm(nn.Conv1d(3, 16, 3, padding=1)),
            nn.LeakyReLU(0.2),
            norm(nn.Conv1d(16, 16, 3, padding=1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            norm(nn.Linear(16 * 64, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(1 - self.layers(x)).mean() + torch.relu(1 + self.layers(x.flip(0))).mean()


def made(name: str) -> tuple[Critic, Tensor]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Critic(NORMS[name]), torch.randn(8, 3, 64)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", NORMS)
def test_the_least_budget_has_the_bits_of_plain_training(name: str) -> None:
    applied, batch = made(name)
    fitted, _ = made(name)
    weight = applied.layers[0].weight
    least_bytes = solve(applied, batch, budget=1).minimum_budget_bytes
    assert least_bytes is not None
    assert applied.layers[0].weight is weight  # no fake tensor is left there
    solution = solve(applied, batch, budget=least_bytes)
    assert solution.simulation.peak_bytes < solution.baseline.peak_bytes
    apply(applied, solution)
    fit(fitted, budget="1MB", optimizer=[])
    for planned in (applied, fitted):
        plain, _ = made(name)
        assert_bitwise_identical(plain, planned, batch)
        with torch.no_grad():  # with the weights of now
            assert torch.equal(plain.eval()(batch), planned.eval()(batch))
