"""Hooks in a step that runs again: each fires once, with the gradient of eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scheduler_runtime import fit
from tests.support.bitwise import assert_equal

Fired = list[tuple[str, torch.Tensor]]


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.one(x) * y)
        return hidden, self.other(hidden)


def halving(fired: Fired, name: str, tensor: torch.Tensor) -> None:
    def halve(gradient: torch.Tensor) -> torch.Tensor:
        fired.append((name, gradient.clone()))
        return gradient * 0.5

    tensor.register_hook(halve)


def noting(fired: Fired, name: str, tensor: torch.Tensor) -> None:
    tensor.register_post_accumulate_grad_hook(lambda t: fired.append((name, t.grad.clone())))


def step(encoder: nn.Module, model: nn.Module, fired: Fired, *, same: bool) -> list[torch.Tensor]:
    """same: one tensor is handed in twice."""
    torch.manual_seed(1)
    leaf = torch.randn(4, 8, requires_grad=True)
    halving(fired, "input", leaf)
    noting(fired, "input, accumulated", leaf)
    x = encoder(leaf)
    halving(fired, "activation", x)
    x.retain_grad()
    for module in (encoder, model):
        module.zero_grad()
    _, output = model(x, x if same else leaf)
    output.square().sum().backward()
    gradients = [p.grad.clone() for m in (encoder, model) for p in m.parameters()]
    return [output.detach(), leaf.grad, x.grad, *gradients]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("same", [False, True])
def test_hooks_fire_once_in_a_step_that_runs_again(same: bool) -> None:
    torch.manual_seed(0)
    encoder, model = nn.Linear(8, 8), TwoOutputs()
    fitted = fit(copy.deepcopy(model), budget="1MB")
    got = []
    for each in (model, fitted):
        theirs, fired = copy.deepcopy(encoder), []
        halving(fired, "weight", each.one.weight)
        noting(fired, "weight, accumulated", each.one.weight)
        got.append(([step(theirs, each, fired, same=same) for _ in range(2)], fired))
    (plain_steps, plain_fired), (steps, fired) = got
    for of_plain, of_fitted in zip(plain_steps, steps, strict=True):
        assert_equal(of_plain, of_fitted)
    # parameters may receive theirs in another order
    order = [sorted(name for name, _ in each) for each in (plain_fired, fired)]
    assert order[0] == order[1]
    for name in set(order[0]):
        values = [[v for n, v in each if n == name] for each in (plain_fired, fired)]
        assert_equal(*values)
