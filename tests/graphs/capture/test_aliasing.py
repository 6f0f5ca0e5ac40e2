"""Tensors that the forward pass writes must not share memory with others that it reads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from solver.solving import solve

Batch = tuple[torch.Tensor, torch.Tensor]


class Shifting(nn.Module):
    """Writes its first argument, and reads the second after that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return (self.linear(x).tanh() * y).pow(2).mean()


class Counting(nn.Module):
    """Writes a buffer that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("all", torch.zeros(8))
        self.register_buffer("part", self.all[:4])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.add_(1.0)
        return (self.linear(x) * self.all.sum()).pow(2).mean()


class Looking(nn.Module):
    """Reads what it writes through a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("part", torch.zeros(4))
        self.view = self.part[:2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.add_(1.0)
        return (self.linear(x) * self.view.sum()).pow(2).mean()


def one_twice() -> Batch:
    x = torch.rand(5, 4)
    return x, x


def a_view() -> Batch:
    x = torch.rand(10, 4)
    return x[:5], x[4:9]


def halves() -> Batch:
    x = torch.rand(10, 4)
    return x[:5], x[5:]


@pytest.mark.parametrize("batch", [one_twice, a_view])
def test_a_written_argument_that_another_one_overlaps_is_refused(batch: object) -> None:
    with pytest.raises(TraceError, match=r"changes tensor 0 of the batch .* with tensor 1 of the"):
        trace(Shifting(), batch())


@pytest.mark.parametrize(
    ("make", "other"), [(Counting, "buffer 'all'"), (Looking, "a tensor that")]
)
def test_a_written_buffer_that_overlaps_is_refused(make: type[nn.Module], other: str) -> None:
    with pytest.raises(TraceError, match=f"changes buffer 'part' in place, .* with {other}"):
        trace(make(), torch.rand(5, 4))


def test_parts_of_one_storage_are_not_in_each_others_way() -> None:
    plain = Shifting()
    planned = copy.deepcopy(plain)
    apply(planned, solve(planned, halves(), budget="1MB"))
    for model in (plain, planned):
        torch.manual_seed(0)
        model(*halves()).backward()
    assert torch.equal(plain.linear.weight.grad, planned.linear.weight.grad)


def test_a_later_call_whose_arguments_overlap_is_noticed() -> None:
    model = Shifting()
    fit(model, budget="1MB", optimizer=torch.optim.SGD(model.parameters()))
    model(torch.rand(5, 4), torch.rand(5, 4)).backward()
    with pytest.raises(TraceError, match="shares memory with tensor 1 of the batch"):
        model(*one_twice())
