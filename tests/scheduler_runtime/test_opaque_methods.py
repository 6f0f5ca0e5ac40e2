"""Methods of a module that holds most of the model: one piece each, eager bits."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from scheduler_runtime.measuring import measure
from tests.scheduler_runtime.test_opaque import half_of_activations, opaque_nodes, train
from tests.support.bitwise import assert_equal

WIDTH, ROWS = 32, 256


class Masking(nn.Module):
    """As Wav2Vec2: time masks drawn with NumPy, written in place; then layers skipped at random."""

    def __init__(self, kind: str = "mask", *, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(5)
        )
        self.first = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("n_masked", torch.zeros(()))
        self.kind, self.drop = kind, drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        masked = getattr(self, self.kind)(x)
        x = x + masked  # the method has written x
        for layer in self.layers:
            if torch.rand([]) >= self.drop:
                x = x + F.dropout(layer(x), 0.1)
        return x.square().mean()

    def mask(self, x: Tensor) -> Tensor:
        """Its gradient of the embedding adds up as many rows as are masked."""
        mask = torch.tensor(numpy.random.rand(len(x)) < 0.3)
        self.n_masked += mask.sum()
        x[mask] = self.embedding
        return x

    def scaled(self, x: Tensor) -> Tensor:
        if x.detach().abs().mean().item() > 0.1:
            return x * self.embedding
        return x.clone()

    def of_layer(self, x: Tensor) -> Tensor:
        return self.first(x) * float(x.detach().sum())

    def of_weight(self, x: Tensor) -> Tensor:
        return x @ self.first.weight * float(x.detach().sum())

    def secretly(self, x: Tensor) -> Tensor:
        x[torch.tensor(numpy.random.rand(len(x)) < 0.3)] = 0.0
        return x.clone()

    def at_times(self, x: Tensor) -> Tensor:
        is_large = x.detach().abs().mean().item() > 10
        return x + (torch.rand_like(x) if is_large else self.embedding)


class Around(nn.Module):
    """The module is not the model itself."""

    def __init__(self, inner: Masking) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).reshape(1)).sum()


def made(*args: Any, **options: Any) -> tuple[Masking, Tensor]:
    torch.manual_seed(0)
    return Masking(*args, **options), torch.randn(ROWS, WIDTH)


@pytest.mark.slow
def test_half_of_the_activations() -> None:
    plain, batch = made()
    model = copy.deepcopy(plain)
    solution = half_of_activations(model, batch)
    assert len(opaque_nodes(solution)) == 1
    assert "mask() is planned as one piece" in " ".join(solution.graph.meta.notes)
    apply(model, solution)
    taken = measure(copy.deepcopy(model), batch, optimizer=None)
    assert taken.peak_bytes <= solution.request.available_bytes
    assert_equal(train(plain, batch), train(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mask", "scaled"])
def test_fit_has_the_bits_of_plain_training(kind: str) -> None:
    inner, batch = made(kind)
    plain = Around(inner)
    fitted = fit(copy.deepcopy(plain), budget="20MB", optimizer=[])
    assert_equal(train(plain, batch), train(fitted, batch))


class Repeated(nn.Module):
    """Its piece runs after each layer, and a call of it reads `gain` with a probability."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.embedding, self.gain = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.mask(x + layer(x))
        return x.square().mean()

    def mask(self, x: Tensor) -> Tensor:
        mask = torch.tensor(numpy.random.rand(len(x)) < 0.3)
        if numpy.random.rand() < self.probability:
            x = x * self.gain
        return torch.where(mask[:, None], self.embedding, x)


@pytest.mark.slow
@pytest.mark.parametrize(("probability", "used"), [(0.0, {False}), (0.3, {False, True})])
def test_a_parameter_that_no_call_of_a_step_reads_has_no_gradient(
    probability: float, used: set[bool]
) -> None:
    """So the optimizer leaves it alone, weight decay too."""
    torch.manual_seed(0)
    plain, batch = Repeated(probability), torch.randn(ROWS, WIDTH)
    fitted = fit(copy.deepcopy(plain), budget="20MB", optimizer=[])
    found = [train(model, batch, n_steps=8) for model in (plain, fitted)]
    assert_equal(*found)
    of_gain = found[0][2 :: 1 + len(list(plain.parameters()))]
    assert {gradient is not None for gradient in of_gain} == used
    assert_equal(plain.parameters(), fitted.parameters())


@pytest.mark.slow
def test_layers_are_skipped_as_in_eager_mode() -> None:
    """The piece draws no numbers of torch, so what is drawn after it is known before the step."""
    plain, batch = made(drop=0.4)
    fitted = fit(copy.deepcopy(plain), budget="20MB", optimizer=[])
    assert_equal(train(plain, batch), train(fitted, batch))


@pytest.mark.slow
def test_a_piece_that_draws_in_a_later_step_is_noticed() -> None:
    model, batch = made("at_times")
    fitted = fit(model, budget="20MB", optimizer=[])
    fitted(batch).backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"'at_times\(\)'.* drew none when it was planned"):
        fitted(100 * batch)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("of_layer", "it calls a submodule, Linear"),
        ("of_weight", "a tensor that requires a gradient is not one of its parameters"),
        ("secretly", "it changes an argument in place, and does not return it exactly once"),
    ],
)
def test_methods_that_cannot_be_one_piece(kind: str, why: str) -> None:
    model, batch = made(kind)
    with pytest.raises(TraceError, match="cannot be") as refused:
        trace(model, batch)
    why = f"'{kind}()' cannot be planned as one piece: {why}"
    assert any(why in note for note in refused.value.__notes__)
    assert kind not in vars(model)
