"""Under autocast, a weight that is used more than once is cast once, as in eager mode."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphs.capture.as_eager.autocast import LOW_PRECISION, casts_once
from graphs.trace import trace
from scheduler_runtime import apply
from solver.solving import solve
from tests.support.bitwise import assert_same_gradients

LARGE = 10**12


def bf16(**options: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16, **options)


def assert_trains_alike(model: nn.Module, batch: Any, **options: Any) -> None:
    planned = copy.deepcopy(model)
    with bf16(**options):
        apply(planned, solve(planned, batch, budget=LARGE))
    for each in (model, planned):
        with bf16(**options):
            loss = each(batch)
        loss.backward()
    for (name, mine), plain in zip(planned.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None, name
        assert torch.equal(mine.grad, plain.grad), name


class Repeats(nn.Module):
    """Uses one module several times."""

    def __init__(self, inner: nn.Module, act: Callable[[Any], Any] = torch.tanh) -> None:
        super().__init__()
        self.inner = inner
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.act(self.inner(x))
        return x.float().pow(2).sum()


class Tied(nn.Module):
    """One weight read in float32 by the embedding and twice in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 16)
        self.head = nn.Linear(16, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        logits = self.head(x)
        again = self.head(x + functional.linear(logits.softmax(-1), self.head.weight.t()))
        return functional.cross_entropy(again.flatten(0, 1).float(), tokens.flatten())


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("inner", "shape"),
    [
        (nn.Linear(16, 16), (8, 16)),
        (nn.Conv1d(4, 4, 3, padding=1), (2, 4, 9)),
        (nn.Conv2d(4, 4, 3, padding="same"), (2, 4, 7, 7)),
        (nn.ConvTranspose2d(4, 4, 3, padding=1), (2, 4, 7, 7)),
        (nn.PReLU(16), (8, 16)),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (3, 5, 16)),
        (nn.GRUCell(16, 16), (8, 16)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_weights_used_more_than_once(inner: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for parameter in inner.parameters():  # also those that begin as zeros
        nn.init.normal_(parameter, std=0.3)
    model = Repeats(inner)
    if isinstance(inner, nn.TransformerEncoderLayer):
        inner.eval()  # without dropout; its gradients are asked for as in training
        model.training = True
    assert_trains_alike(model, torch.randn(shape))


def test_weights_tied_with_an_embedding() -> None:
    torch.manual_seed(0)
    assert_trains_alike(Tied(), torch.randint(29, (4, 6)))


@pytest.mark.slow
def test_without_autocasts_memory_each_use_is_cast() -> None:
    torch.manual_seed(0)
    assert_trains_alike(Repeats(nn.Linear(16, 16)), torch.randn(8, 16), cache_enabled=False)
    counts = []
    for options in ({}, {"cache_enabled": False}):
        with bf16(**options):
            graph = trace(Repeats(nn.Linear(16, 16)), torch.randn(8, 16))
        counts.append(sum(n.op == "aten._to_copy.default" for n in graph.nodes))
    assert counts[0] < counts[1]


class Regions(nn.Module):
    """Enters autocast by itself: each end of the outermost region forgets the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n_uses in (2, 3):
            with bf16():
                for _ in range(n_uses):
                    x = torch.tanh(self.inner(x))
        with torch.autocast("cpu", enabled=False):
            x = self.inner(x.float())
        return x.pow(2).sum()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("outer", [bf16, contextlib.nullcontext])
def test_autocast_entered_inside_the_module(outer: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = Regions()
    planned = copy.deepcopy(model)
    batch = torch.randn(8, 16)
    with outer():
        apply(planned, solve(planned, batch, budget=LARGE))
    for each in (model, planned):
        with outer():
            loss = each(batch)
        loss.backward()
    assert torch.equal(planned.inner.weight.grad, model.inner.weight.grad)


def test_every_operator_that_autocast_lowers_is_known() -> None:
    """And only those: an operator that keeps float32 must not be handed a low-precision copy."""
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    for name, run in {"mm": torch.mm, "matmul": torch.matmul, "softmax": torch.softmax}.items():
        with bf16():
            low = run(x, 0 if name == "softmax" else w).dtype == torch.bfloat16
        assert low == (name in LOW_PRECISION)


def test_the_kernels_come_back() -> None:
    leaf = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)
    with casts_once([leaf], cache_enabled=True), bf16():
        assert functional.linear(x, leaf).dtype == torch.bfloat16
    kernel = torch._C._dispatch_dump("aten::linear")
    assert "autocast_casts" not in kernel
    with bf16():
        assert functional.linear(x, leaf).dtype == torch.bfloat16


class SharedModules(nn.Module):
    """A submodule under two names, a tensor under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.first = inner
        self.second = nn.Sequential(inner)
        self.scale = nn.Parameter(torch.ones(16))
        self.same_scale = self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x)) * self.scale * self.same_scale).sum()


def test_modules_under_two_names_are_left_as_they_were() -> None:
    torch.manual_seed(0)
    model = SharedModules()
    before = {k: (id(v), v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    batch = torch.randn(8, 16)
    plain = copy.deepcopy(model)
    apply(model, solve(model, batch, budget=LARGE))
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity, name
        assert torch.equal(after[name], value), name
    for each in (model, plain):
        each(batch).backward()
    assert_same_gradients(model, plain)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
