"""Dead code: operators that eager mode runs and a trace leaves out; what variables hold of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphs.graph import Graph, with_dead_code
from graphs.trace import trace
from scheduler_runtime.measuring import measure
from solver import solve

N_BYTES = 64 * 256 * 4


class Model(nn.Module):
    """Runs some code between two layers; holds what that code returns until forward returns."""

    def __init__(self, code: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(256, 256), nn.Linear(256, 256)
        self.register_buffer("mean", torch.zeros(256))
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x).relu()
        held = [self.code(x, self.mean)]
        x = self.other(x).relu().square().mean()
        del held
        return x


def in_place_twice(x: torch.Tensor, _mean: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(x)
    copy.copy_(x)
    return copy.add_(1)


DEAD: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], list[int]]] = {
    "a copy": (lambda x, _: x.clone(), [N_BYTES]),
    "two, the second from the first": (lambda x, _: [a := x + 1, a + 1], [N_BYTES, N_BYTES]),
    "written in place": (in_place_twice, [N_BYTES]),
    "a view of a copy": (lambda x, _: x.clone()[:1], [N_BYTES]),
    "like a traced operator after it": (
        lambda x, mean: nn.functional.linear(x, torch.ones(256, 256), mean),
        [4 * 256 * 256, N_BYTES],
    ),
    "freed at once": (lambda x, _: (x.abs().sum(), None)[1], [N_BYTES, 4]),
}
NOT_DEAD: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "nothing": lambda _x, _mean: None,
    "an empty tensor": lambda x, _mean: x.new_empty(0),
    "a view": lambda x, _: x[:1],
    "a buffer updated": lambda x, mean: mean.mul_(0.9).add_(0.1 * x.detach().mean(0)),
    "a buffer set": lambda x, mean: mean.copy_(x.detach().mean(0)),
}


def traced(code: Callable[[torch.Tensor, torch.Tensor], object]) -> tuple[nn.Module, Graph]:
    model = Model(code)
    return model, trace(model, torch.randn(64, 256))


@pytest.mark.parametrize("name", DEAD)
def test_what_dead_code_makes_is_known(name: str) -> None:
    code, sizes = DEAD[name]
    model, graph = traced(code)
    assert [result["size_bytes"] for result in graph.meta.dead_results.values()] == sizes
    solution = solve(model, torch.randn(64, 256), budget="1GB", optimizer=None)
    measured = measure(model, torch.randn(64, 256), n_steps=1).peak_bytes
    assert abs(solution.baseline.peak_bytes - measured) <= 64  # scalars


@pytest.mark.parametrize("name", NOT_DEAD)
def test_what_has_an_effect_or_allocates_nothing_is_not_dead(name: str) -> None:
    _, graph = traced(NOT_DEAD[name])
    assert not graph.meta.dead_results
    assert with_dead_code(graph) is graph


def read_after_a_write(x: torch.Tensor, _mean: torch.Tensor) -> object:
    mask = torch.ones(64)
    mask[0] = 0  # in a rehearsal, its value would be unknown
    return x.clone() if mask.any() else x + 1


def test_what_is_read_after_a_write_is_known_without_tracing() -> None:
    _, graph = traced(read_after_a_write)
    assert N_BYTES in [result["size_bytes"] for result in graph.meta.dead_results.values()]


class Clipped(torch.autograd.Function):
    """Computes a mask that only the backward pass reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.abs() < 1)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask


SAVED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a copy of what a product overwrites": lambda x, y: (x + 1).mul_(y),
    "a mask": lambda x, y: Clipped.apply(x) + y,
}


@pytest.mark.parametrize("name", SAVED)
def test_what_autograd_alone_saves_is_not_dead(name: str) -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SAVED[name](self.one(x), self.other(x)).sin().mean()

    model, batch = Products(), torch.randn(256, 256)
    graph = trace(model, batch)
    assert not graph.meta.dead_calls
    assert not graph.meta.dead_results
    assert solve(graph, budget="1GB").baseline.peak_bytes == measure(model, batch).peak_bytes
