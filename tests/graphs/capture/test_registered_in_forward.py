"""What forward registers in its first call: buffers are planned, or all of it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from scheduler_runtime.fitting import plans_of
from solver import solve
from tests.support.bitwise import assert_equal


class Attending(nn.Module):
    """Attention with a mask, which `make` returns; it is a buffer from the first call on.

    Rows that are read are the first ones, as code for several lengths does.
    """

    def __init__(self, make: Callable[[nn.Module, int], torch.Tensor], *, declared: bool) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(8, 8), make
        self.register_buffer("slopes", torch.rand(8))
        if declared:
            self.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = getattr(self, "mask", None)
        if mask is None:
            mask = self.make(self, len(x))
            self.register_buffer("mask", mask, persistent=False)
        h = self.layer(x)
        scores = (h @ h.T + mask[: len(x), : len(x)]).softmax(-1)
        return (scores @ h).square().mean()


def of_constants(_: nn.Module, n: int) -> torch.Tensor:
    return torch.full((n, n), -1e9).triu(1)


def of_a_buffer(module: Any, n: int) -> torch.Tensor:
    return torch.ones(n, n).tril() * module.slopes[0]


def train(model: nn.Module, lengths: list[int]) -> list[torch.Tensor]:
    seen = []
    for n in lengths:
        torch.manual_seed(n)
        model.zero_grad()
        loss = model(torch.randn(n, 8))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return seen


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("make", [of_constants, of_a_buffer])
def test_fit_registers_the_buffer_as_the_first_call_does(make: Any, declared: bool) -> None:
    plain = Attending(make, declared=declared)
    fitted = fit(copy.deepcopy(plain), budget="5MB")
    assert_equal(train(plain, [8, 8, 6, 8]), train(fitted, [8, 8, 6, 8]))
    assert_equal(list(plain.buffers()), list(fitted.buffers()))
    assert list(fitted.state_dict()) == list(plain.state_dict())
    assert len(plans_of(fitted)) == 2  # one for each length


def test_planning_leaves_the_buffer_to_the_first_call() -> None:
    plain = Attending(of_constants, declared=False)
    solution = solve(plain, torch.randn(8, 8), budget="5MB")
    assert [name for name, _ in plain.named_buffers()] == ["slopes"]
    planned = apply(copy.deepcopy(plain), solution)
    assert_equal(train(plain, [8, 8]), train(planned, [8, 8]))
    assert len(planned.forward._programs.programs) == 1


class Grid(nn.Module):
    """Keeps the coordinates of an image and its size, as neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.grid, self.size = nn.Linear(3, 2), None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grid is None or self.size != x.shape[:2]:
            self.size = x.shape[:2]
            rows, columns = (torch.linspace(0, 1, n) for n in self.size)
            self.grid = list(torch.meshgrid(rows, columns, indexing="ij"))
        return self.layer(torch.stack([*self.grid, x], -1)).square().mean()


def test_lists_and_sizes_are_filled() -> None:
    plain = Grid()
    fitted = fit(copy.deepcopy(plain), budget="5MB")
    assert_equal(train(plain, [4, 4, 6, 6]), train(fitted, [4, 4, 6, 6]))
    assert_equal(plain.grid, fitted.grid)
    assert (fitted.size, len(plans_of(fitted))) == (plain.size, 2)


class Registering(nn.Module):
    def __init__(self, register: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.layer, self.register = nn.Linear(8, 8), register

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.register(self, x)
        late: Any = self.late
        return (late(self.layer(x)) if callable(late) else self.layer(x) * late).square().mean()


@pytest.mark.parametrize(
    ("register", "what"),
    [
        (lambda m, x: m.register_buffer("late", x.mean(0)), "buffer 'late'.* is planned"),
        (
            lambda m, _: m.register_parameter("late", nn.Parameter(torch.ones(8))),
            "parameter 'late'",
        ),
        (lambda m, _: m.add_module("late", nn.Linear(8, 4)), "submodule 'late'.*its optimizer"),
    ],
)
def test_other_first_calls_are_refused_and_leave_nothing(register: Any, what: str) -> None:
    model, x = Registering(register), torch.randn(4, 8)
    with pytest.raises(TraceError, match=f"registers the {what}"):
        trace(model, x)
    assert not hasattr(model, "late")
    model(x).backward()  # called once, with tensors that have values
    assert trace(model, x).nodes
