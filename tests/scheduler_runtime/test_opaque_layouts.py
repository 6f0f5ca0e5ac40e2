"""Parts in one piece whose gradients are not contiguous in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scheduler_runtime import apply, fit
from solver import solve
from tests.support.bitwise import assert_equal

WIDTH = 16


class Transposing(nn.Module):
    """Branches on a number; the gradient of its input is a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.transpose(1, 2))
        return (y if y.mean().item() < 9 else -y).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Between(nn.Module):
    """A part between two linear layers."""

    def __init__(self, part: nn.Module, *, residual: bool) -> None:
        super().__init__()
        self.before, self.part, self.after = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = self.part(x)
        return self.after(x + y if self.residual else y).square().mean()


def two_steps(model: nn.Module, batch: Tensor, *, fitted: bool = False) -> list[Tensor]:
    """Losses and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fitted:
        fit(model, budget="1GB", optimizer=optimizer)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return found


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("part", [Lstm, Transposing])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("fitted", [True, False])
def test_input_gradients_that_are_not_contiguous(
    part: Callable[[], nn.Module], residual: bool, fitted: bool
) -> None:
    torch.manual_seed(0)
    plain, batch = Between(part(), residual=residual), torch.randn(4, 8, WIDTH)
    model = copy.deepcopy(plain)
    if not fitted:
        apply(model, solve(model, batch, budget="1GB"))
    assert_equal(two_steps(plain, batch), two_steps(model, batch, fitted=fitted))


class Squashing(nn.Module):
    """Branches on a number; the gradient of its input lies in memory as that of its output."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return y if y.mean().item() < 9 else -y


class Across(nn.Module):
    """Two parts, of whose output the gradient is transposed, behind a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.parts, self.after = nn.Sequential(Squashing(), Squashing()), nn.Linear(33, 33)

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts(self.before(x) * self.scale)
        return self.after(y.transpose(1, 2)).square().mean()


@pytest.mark.slow
def test_output_gradients_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    plain, batch = Across(), torch.randn(4, 33, WIDTH)
    model = copy.deepcopy(plain)
    apply(model, solve(model, batch, budget="1GB"))
    assert_equal(two_steps(plain, batch), two_steps(model, batch))
