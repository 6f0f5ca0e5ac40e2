"""Tensors in plain attributes: read as in the plain module at each call, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.same_bits import keeping_nothing
from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit, plans_of, verify
from solver import solve
from tests.support.bitwise import assert_same_gradients

WIDTH = 16


class Helper:
    def __init__(self) -> None:
        self.shift = torch.ones(WIDTH)


class Holding(nn.Module):
    """Scales by what it holds in attributes that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = torch.tensor(2.0)
        self.shifts = [torch.zeros(WIDTH), torch.ones(WIDTH)]
        self.unread = torch.zeros(3)
        self.power = (2, 1)
        self.helper = Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x) * self.scale + self.shifts[1] + self.helper.shift
        if self.scale > 1:
            hidden = hidden.cos()
        return (hidden ** self.power[0]).mean()


def rewritten(model: Holding) -> None:
    model.scale.fill_(0.5)


def replaced(model: Holding) -> None:
    model.scale = torch.tensor(3.0)


def replaced_in_list(model: Holding) -> None:
    model.shifts[1] = torch.full((WIDTH,), 0.25)


def replaced_in_object(model: Holding) -> None:
    model.helper.shift = torch.full((WIDTH,), 0.25)


def other_tuple(model: Holding) -> None:
    model.power = (4, 1)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    "change", [rewritten, replaced, replaced_in_list, replaced_in_object, other_tuple]
)
def test_a_change_between_calls_is_seen(change: Callable[[Holding], None]) -> None:
    torch.manual_seed(0)
    plain, x = Holding(), torch.randn(4, WIDTH)
    planned = copy.deepcopy(plain)
    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters()))
    planned(x)
    for model in (plain, planned):
        change(model)
        model.zero_grad()
        model(x).backward()
    assert torch.equal(plain(x), planned(x))
    assert_same_gradients(plain, planned)


def test_what_is_not_read_may_be_replaced() -> None:
    model, x = Holding(), torch.randn(4, WIDTH)
    fit(model, budget="100MB", optimizer=torch.optim.SGD(model.parameters()))
    model(x)
    model.unread = torch.ones(3)
    model.shifts[0] = torch.ones(WIDTH)
    model(x)
    assert len(plans_of(model)) == 1


def test_a_change_before_the_backward_pass_is_refused() -> None:
    model, x = Holding(), torch.randn(4, WIDTH)
    fit(model, budget="100MB", optimizer=torch.optim.SGD(model.parameters()))
    loss = model(x)
    model.scale.mul_(2)
    with pytest.raises(RuntimeError, match="a tensor that the model holds was changed in place"):
        loss.backward()


class Unregistered(nn.Module):
    """A parameter that the module does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.hidden = [nn.Parameter(torch.ones(WIDTH))]
        self.trained = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.hidden[0]
        if not self.trained:
            with torch.no_grad():
                weight = weight * 2
        return (self.layer(x) * weight).square().mean()


def test_a_parameter_that_is_not_registered_is_refused() -> None:
    with pytest.raises(TraceError, match=r"shape \(16,\) that requires a gradient and is not a"):
        trace(Unregistered(), torch.randn(4, WIDTH))


class _CallsAgain(torch.autograd.Function):
    """Its backward pass calls the module again, as adjoint methods of differential equations do."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            leaves = (x, *ctx.layer.parameters())
            return None, *torch.autograd.grad(ctx.layer(x), leaves, gradients)


class Elsewhere(nn.Module):
    """Reads a registered parameter through something else that refers to it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how
        self.store = {"weight": self.layer.weight} if how == "dict" else None
        self.helper = Helper()
        if how == "object":
            self.helper.shift = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "function":
            return _CallsAgain.apply(self.layer, x, *self.layer.parameters()).mean()  # type: ignore[no-any-return]
        weight = self.helper.shift if self.store is None else self.store["weight"]
        return (x @ weight).mean()


@pytest.mark.parametrize("how", ["dict", "object", "function"])
def test_a_registered_parameter_that_is_read_elsewhere_is_named(how: str) -> None:
    with pytest.raises(TraceError, match=r"reads parameter 'layer\.weight' by another way"):
        trace(Elsewhere(how), torch.randn(4, WIDTH))


def test_it_may_be_read_without_a_gradient() -> None:
    model = Unregistered()
    model.trained = False
    assert trace(model, torch.randn(4, WIDTH)).nodes


MIXING = torch.randn(WIDTH, 2 * WIDTH)


class Mixing(nn.Module):
    """Reads a tensor of the surrounding code in both passes, whole, transposed and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.layer(x)) @ MIXING
        left, right = MIXING.split(WIDTH, dim=1)
        return (hidden @ MIXING.t() + hidden[:, :WIDTH] @ left @ right).square().mean()


def test_a_tensor_that_is_read_several_times_is_counted_once() -> None:
    """Each use has a fake tensor of its own in a trace."""
    graph = trace(Mixing(), torch.randn(4, WIDTH))
    constants = [t for t in graph.tensors if t.kind == "buffer"]
    assert [t.size_bytes for t in constants] == [4 * WIDTH * 2 * WIDTH]
    assert not [t for t in graph.tensors if t not in constants and t.size_bytes > 4 * WIDTH * WIDTH]


def test_a_tensor_that_is_read_several_times_keeps_its_bits_in_a_plan() -> None:
    torch.manual_seed(0)
    model, x = Mixing(), torch.randn(64, WIDTH)
    expected = copy.deepcopy(model)
    expected(x).backward()
    planned = apply(copy.deepcopy(model), keeping_nothing(trace(model, x)))
    planned(x).backward()
    assert_same_gradients(planned, expected)


@pytest.mark.slow
def test_verify_counts_tensors_of_the_surrounding_code() -> None:
    """They are there without the plan, too."""
    torch.manual_seed(0)
    model, x = Mixing(), torch.randn(64, WIDTH)
    solution = solve(model, x, budget="1MB", rewrites="none", optimizer=torch.optim.AdamW)
    found = verify(solution, model=lambda: copy.deepcopy(model), batch=lambda: x)
    assert found.passed
    assert found.baseline_measured_peak_bytes == pytest.approx(
        solution.baseline.peak_bytes, rel=0.02
    )
    assert found.warnings == ()
