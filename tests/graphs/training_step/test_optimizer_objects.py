"""Optimizers that keep their state in objects, such as the preconditioners of a Shampoo."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn, optim

from graphs.costs.models import Roofline
from graphs.hardware import named
from graphs.training_step.optimizer import optimizer_costs


class Statistics:
    """State of a parameter as an object, which the step changes in place."""

    def __init__(self, parameter: nn.Parameter, holds: Any) -> None:
        self.sums = [torch.zeros_like(parameter)]
        self.parameter, self.holds = parameter, holds

    def add(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.sums[0].mul_(0.9).add_(gradient)


class WithObjects(optim.Optimizer):
    """Keeps its state in objects, which hold their parameter and one of the class's `held`."""

    held: tuple[Any, ...] = (None, "a name")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p, holds in zip(self.param_groups[0]["params"], self.held, strict=True):
            if not self.state[p]:
                self.state[p]["statistics"] = Statistics(p, holds)
            p.add_(self.state[p]["statistics"].add(p.grad), alpha=-0.1)


class WithUncopied(WithObjects):
    held = (threading.Lock(), torch.Generator())


@pytest.mark.parametrize("kind", [WithObjects, WithUncopied])
@pytest.mark.parametrize("n_steps", [0, 1])
def test_objects_in_the_state_count_and_are_untouched(
    kind: type[WithObjects], n_steps: int
) -> None:
    net = nn.Linear(64, 64)
    optimizer = kind(net.parameters(), {})
    for _ in range(n_steps):
        net(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    kept = [state["statistics"].sums[0] for state in optimizer.state.values()]
    before = [each.clone() for each in kept]
    device, costs = torch.device("cpu"), Roofline(named("cpu"))
    figures = optimizer_costs(optimizer, net, device=device, costs=costs)
    assert figures["state_bytes"] == 4 * (64 * 64 + 64)
    assert len(before) == 2 * n_steps
    assert all(map(torch.equal, before, kept))
