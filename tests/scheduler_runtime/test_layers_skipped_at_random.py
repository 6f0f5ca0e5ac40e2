"""LayerDrop: each choice of layers is a program, which the generator's state decides before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.capture.as_eager.drawn_values import Draws
from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit, plans_of
from solver.schedule import Solution
from solver.solving import solve
from tests.support.bitwise import assert_equal

WIDTH = 16


class Dropping(nn.Module):
    """Skips layers at random, between dropouts. how: as libraries write it."""

    def __init__(self, how: str, *, n_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(n_layers)
        )
        self.drop = nn.Dropout(0.1)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        kept = torch.rand(len(self.layers)) > 0.4
        for index, layer in enumerate(self.layers):
            if self.how == "scalar" and torch.rand([]) < 0.4:
                continue
            if self.how == "large" and torch.rand(9, 99).mean() < 0.5:
                continue
            if self.how == "vector" and not kept[index]:
                continue
            if self.how == "item" and not torch.empty(()).bernoulli(0.6).bool().item():
                continue
            x = x + self.drop(layer(x))
        return x.square().mean()


def made(how: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Dropping(how), torch.randint(0, 40, (64,))


def train(model: nn.Module, batch: Tensor, *, n_steps: int = 6) -> list[Any]:
    """Losses, gradients (None of a skipped layer) and random states."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        seen += [loss.detach(), torch.get_rng_state()]
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scalar", "vector", "item"])
def test_each_choice_has_a_plan_and_the_bits_of_plain_training(how: str) -> None:
    plain, batch = made(how)
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    expected = train(plain, batch)
    assert_equal(expected, train(fitted, batch))
    n_plans = len(plans_of(fitted))
    assert 1 < n_plans < 5  # several choices came, and one that came again was not planned again
    assert_equal(train(plain, batch), train(fitted, batch))
    assert len(plans_of(fitted)) == n_plans


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scalar", "large"])
def test_a_step_draws_once_more_however_many_plans_there_are(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, batch = made(how)
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    train(fitted, batch)
    assert len(plans_of(fitted)) > 2
    own, drawn = Draws._run_call, []
    monkeypatch.setattr(Draws, "_run_call", lambda *a: (drawn.append(a), own(*a))[1])
    n_steps, n_in_forward = 6, 2 + 2 * len(plain.layers)
    train(fitted, batch, n_steps=n_steps)
    assert n_steps < len(drawn) <= n_steps * n_in_forward


@pytest.mark.slow
def test_a_plan_of_one_choice_is_followed_by_plans_of_the_others() -> None:
    plain, batch = made("scalar")
    torch.manual_seed(5)
    solution: Solution = solve(plain, batch, budget="1MB")
    planned = apply(copy.deepcopy(plain), solution)
    assert_equal(train(plain, batch), train(planned, batch))


class Branching(nn.Module):
    """A layer that is planned as one piece, and measured for that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


@pytest.mark.slow
def test_a_choice_with_another_piece_is_planned_while_the_user_profiles() -> None:
    plain, batch = made("scalar")
    plain.layers[1] = Branching()
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    expected = train(plain, batch)
    with torch.profiler.profile() as profiler:
        assert_equal(expected, train(fitted, batch))
    assert len(plans_of(fitted)) > 1
    assert any(event.key == "aten::embedding" for event in profiler.key_averages())


def test_planning_draws_nothing() -> None:
    model, batch = made("scalar")
    before = torch.get_rng_state()
    trace(model, batch)
    assert torch.equal(before, torch.get_rng_state())


class Reading(nn.Module):
    """Branches on what `decide` returns for its activations."""

    def __init__(self, decide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.linear(x).sum() if self.decide(x.detach()) else x.sum()


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    "decide",
    [
        lambda x: (torch.poisson(x.abs() * 20), torch.rand([]))[1] < 0.5,  # how many it draws
        lambda x: (torch.multinomial(x.softmax(-1), 2), torch.rand([]))[1] < 0.5,  # the same
        lambda x: torch.bernoulli(x.sigmoid().mean()) == 1.0,
        lambda x: nn.functional.dropout(x).sum() > 0,
        lambda _: torch.empty(()).bernoulli_(torch.tensor(0.6)) == 1.0,
        lambda _: torch.normal(torch.tensor(1.0), torch.tensor(1.0)) > 0.0,
        lambda _: torch.randint_like(torch.empty(()), torch.tensor(3)) == 0,
        lambda _: torch.rand([]).item() < 0.5,  # another number in each step
        lambda _: len(torch.rand(9).lt(0.5).nonzero()) > 4,
    ],
)
def test_what_cannot_be_known_before_the_step_is_refused(decide: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TraceError, match="reads values that the step computes"):
        trace(Reading(decide), torch.randn(3, 4))
