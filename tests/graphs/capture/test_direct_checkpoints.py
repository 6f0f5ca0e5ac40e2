"""Models that call `torch.utils.checkpoint` by themselves are planned without, and left as is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphs.trace import trace
from scheduler_runtime import apply
from solver import solve
from tests.support.bitwise import assert_equal


class Checkpointed(nn.Module):
    """use_reentrant: None calls the functions directly."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.lower = nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            y = self.first(x).detach() + self.block(self.lower(x))
        else:
            # of this one, the argument needs no gradient: the reentrant kind gives it none
            y = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
            y = y + checkpoint(self.block, self.lower(x), use_reentrant=self.use_reentrant)
        return y.square().mean()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_planning_leaves_the_buffers_as_they_are(use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    before = copy.deepcopy(model.state_dict())
    trace(model, torch.randn(8, 4))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_plan_is_that_of_the_model_without_its_checkpoints() -> None:
    x = torch.randn(8, 4)
    model, plain = Checkpointed(True), Checkpointed(None)
    plain.load_state_dict(model.state_dict())
    solution, other = (solve(each, x, budget="1GB") for each in (model, plain))
    assert solution.simulation.peak_bytes == other.simulation.peak_bytes
    assert solution.graph.meta.own_checkpoints
    apply(model, solution)
    for each in (model, plain):
        torch.manual_seed(0)
        each(x).backward()
    assert model.first.weight.grad is None
    for one, same in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is same.grad or torch.equal(one.grad, same.grad)
    assert_equal(model.buffers(), plain.buffers())


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3


@pytest.mark.slow
def test_a_part_that_is_not_traced_may_be_inside() -> None:
    model = Checkpointed(True)
    model.block.append(Branches())
    graph = trace(model, torch.randn(8, 4))
    assert [each["module"] for each in graph.meta.environment["opaque"]] == ["block.3"]
