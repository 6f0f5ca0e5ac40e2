"""Modules that can neither be traced nor be planned as one piece."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphs.trace import TraceError, trace
from tests.support.opaque_models import (
    WIDTH,
    Experts,
    Network,
)

LEAKED: list[Tensor] = []


class Refused(nn.Module):
    """What an opaque part may not do; `how` says which."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(WIDTH, WIDTH)
        self.n_calls, self.counter = 0, SimpleNamespace(config=Counter())
        self.register_buffer("steps", torch.zeros(()))
        self.in_list = [self.steps]

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.how == "list first":
            self.in_list[0].add_(1)
        if y.sum().item() > 1e9:
            y = 2 * y
        if self.how == "attribute":
            self.n_calls += 1
        if self.how == "object":
            self.counter.config.n_calls += 1
        if self.how == "list":
            self.in_list[0].add_(1)
        if self.how == "leak":
            LEAKED[:] = [y]
        if self.how == "view":
            return x.view(-1, WIDTH)
        if self.how == "in place":
            return x.add_(y)
        if self.how == "number":
            return y.sum().item()
        if self.how == "size":
            return y[y[:, 0] > 0].sum(0, keepdim=True) + y[y[:, 0] > 0][:1] * 0, y[y[:, 0] > 0]
        return y


class Counter:
    def __init__(self) -> None:
        self.n_calls = 0


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.part = nn.Embedding(50, WIDTH), Refused(how)

    def forward(self, tokens: Tensor) -> Tensor:
        made = self.part(self.embed(tokens))
        made = made[0] if isinstance(made, tuple) else made
        return made.mean() if isinstance(made, Tensor) else self.embed(tokens).mean() * made


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("attribute", "changes the attribute 'n_calls'"),
        ("object", "changes the attribute 'counter'"),
        ("list", "a buffer by something else than its attribute"),
        ("leak", "held elsewhere after its call"),
        ("view", "shares memory with another, or an input"),
        ("in place", "in place"),
        ("number", "something other than tensors and None"),
        ("size", "size of what it returns depends on values"),
    ],
)
def test_what_cannot_be_one_piece_is_refused_as_before(how: str, why: str) -> None:
    model = Around(how)
    with pytest.raises(TraceError, match="reads values that the step computes") as refused:
        trace(model, torch.randint(0, 50, (64,)))
    assert any(
        "'part' cannot be planned" in note and why in note for note in refused.value.__notes__
    )
    assert model.part.n_calls == model.part.counter.config.n_calls == model.part.steps == 0


@pytest.mark.slow(sample=1)
def test_a_buffer_in_a_list_keeps_its_value() -> None:
    model = Around("list first")
    with pytest.raises(TraceError, match="changes in place a tensor that it has not made"):
        trace(model, torch.randint(0, 50, (64,)))
    assert model.part.steps == 0


@pytest.mark.slow
def test_the_enclosing_module_is_tried() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Refused("size")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[0].expand(len(x), -1) + x

    torch.manual_seed(0)
    model = Network(Wrapped, n_blocks=2)
    graph = trace(model, torch.randint(0, 50, (64,)))
    assert [part["module"] for part in graph.meta.environment["opaque"]] == ["parts.0", "parts.1"]


def test_a_model_without_values_is_refused_as_before() -> None:
    with torch.device("meta"):
        model = Network(Experts, n_blocks=1)
        batch = torch.zeros(64, dtype=torch.long)
    with pytest.raises(TraceError, match="reads values that the step computes"):
        trace(model, batch)
