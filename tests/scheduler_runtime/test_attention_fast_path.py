"""Attention in evaluation mode, which eager mode runs as one fused operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from graphs.trace import TraceError
from scheduler_runtime import apply
from solver import solve
from solver.schedule import Solution

WIDTH = 32


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)


class Frozen(nn.Module):
    """Features of a module in evaluation mode, and a layer that is trained on them.

    The module is frozen, or runs without gradients.
    """

    def __init__(self, features: nn.Module, *, frozen: bool = True) -> None:
        super().__init__()
        self.features = features.eval().requires_grad_(not frozen)
        self.linear, self.frozen = nn.Linear(WIDTH, WIDTH), frozen

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        with torch.set_grad_enabled(self.frozen):
            made = self.made(x, padding)
        return (self.linear(made) - x).square().mean()

    def made(self, x: Tensor, padding: Tensor | None) -> Tensor:
        made: Tensor
        if isinstance(self.features, nn.MultiheadAttention):
            made = self.features(x, x, x)[0]
        elif padding is not None:
            made = self.features(x, src_key_padding_mask=padding)
        else:
            made = self.features(x)
        return made


FEATURES: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "layers": (2, lambda: nn.Sequential(layer(), nn.Tanh(), layer())),
    "attention": (1, lambda: nn.MultiheadAttention(WIDTH, 4, batch_first=True)),
    "padded": (1, lambda: nn.TransformerEncoder(layer(), 2)),
}


@pytest.fixture
def with_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def case(name: str, *, frozen: bool = True) -> tuple[Frozen, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    padding = torch.zeros(8, 16, dtype=torch.bool)
    padding[0, 12:] = True
    batch = torch.randn(8, 16, WIDTH)
    model = Frozen(FEATURES[name][1](), frozen=frozen)
    return model, (batch, padding) if name == "padded" else (batch,)


def planned_pieces(solution: Solution) -> int:
    return sum(node.op.startswith("opaque_forward") for node in solution.graph.nodes)


def check(name: str, n_pieces: int, *, frozen: bool = True) -> None:
    """A plan has this many opaque pieces and the bits of eager mode."""
    plain, batch = case(name, frozen=frozen)
    model = copy.deepcopy(plain)
    solution = solve(model, batch, budget="1GB")
    assert planned_pieces(solution) == n_pieces
    apply(model, solution)
    losses = [each(*batch) for each in (plain, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert torch.equal(plain.linear.weight.grad, model.linear.weight.grad)


@pytest.mark.usefixtures("with_fast_path")
@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_the_fast_path_runs_in_a_plan(name: str) -> None:
    check(name, FEATURES[name][0])


@pytest.mark.slow
@pytest.mark.usefixtures("with_fast_path")
def test_the_fast_path_runs_where_gradients_are_off() -> None:
    check("layers", 2, frozen=False)


@pytest.mark.slow
@pytest.mark.usefixtures("with_fast_path")
def test_without_the_fast_path_attention_is_traced() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    check("layers", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("with_fast_path")
def test_in_training_attention_is_traced() -> None:
    model, batch = case("layers")
    assert planned_pieces(solve(model.train(), batch, budget="1GB")) == 0


@pytest.mark.usefixtures("with_fast_path")
def test_a_model_of_attention_alone_is_refused_with_the_remedy() -> None:
    model = layer().eval().requires_grad_(False)
    with pytest.raises(TraceError, match="set_fastpath_enabled"):
        solve(model, torch.randn(8, 16, WIDTH), budget="1GB", loss=lambda y: y.sum())
