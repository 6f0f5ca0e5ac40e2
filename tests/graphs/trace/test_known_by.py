"""Layers that are alike are traced once; whatever may matter to a trace tells layers apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.trace import layers as layers_module
from graphs.trace import read_layers
from graphs.trace.known_by import trace_key


class Part(nn.Module):
    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask: Any = self.mask
        return x + self.drop(F.relu(self.linear(x * self.scale))) * mask


def read(layers: list[nn.Module], batch: torch.Tensor) -> tuple[Any, ...]:
    found = read_layers(layers, batch, stage_of=lambda part: nn.Sequential(*part))
    forms = [(each.inputs.shape, each.inputs.requires_grad, each.inputs.device) for each in found]
    return tuple(
        zip(forms, [dataclasses.replace(each, inputs=None) for each in found], strict=True)
    )


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: Part(), torch.zeros(2, 4)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(2, 3, 8)),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)), torch.zeros(2, 3, 16, 16)),
    ],
)
def test_layers_that_are_alike_are_traced_once(
    make: Callable[[], nn.Module], batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_traced, trace_module = 0, layers_module.trace_module

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_traced
        n_traced += 1
        return trace_module(*args, **options)

    monkeypatch.setattr(layers_module, "trace_module", counted)
    layers = [make() for _ in range(4)]
    found = read(layers, batch)
    is_convolution = batch.dim() == 4  # each gets a smaller image
    assert n_traced == (4 if is_convolution else 2)  # what the first one gets has no gradient
    monkeypatch.setattr(layers_module, "trace_key", lambda *_: None)
    assert read(layers, batch) == found


def test_a_layer_that_shares_a_parameter_with_another_has_a_form_of_its_own() -> None:
    layers: list[nn.Module] = [Part() for _ in range(4)]
    last: Any = layers[3]
    last.linear.weight = layers[2].linear.weight
    forms = [each.form for _, each in read(layers, torch.zeros(2, 4))]
    assert len(set(forms)) == 4


class Object:
    """Nothing is known of it."""


def with_hook(part: Part) -> None:
    count: list[int] = []
    part.linear.register_forward_hook(lambda *_: count.append(0))


def tied(part: Part) -> None:
    part.drop.weight = part.linear.weight


def aliased(part: Part) -> None:
    part.mask = part.linear.bias.detach()


CHANGES: dict[str, Callable[[Part], object]] = {
    "number": lambda part: setattr(part, "scale", 0.25),
    "sign of zero": lambda part: setattr(part, "scale", -0.0),
    "kind of number": lambda part: setattr(part, "scale", 1),
    "mode": lambda part: part.drop.eval(),
    "frozen": lambda part: part.linear.bias.requires_grad_(False),
    "dtype": lambda part: part.linear.double(),
    "device": lambda part: part.to("meta"),
    "content of a buffer": lambda part: part.mask.zero_(),
    "tied": tied,
    "buffer in a parameter's memory": aliased,
    "attribute": lambda part: setattr(part, "note", "another"),
    "attribute of a parameter": lambda part: setattr(part.linear.weight, "note", "another"),
    "own forward": lambda part: setattr(part.linear, "forward", F.relu),
    "class": lambda part: setattr(part, "drop", nn.AlphaDropout(0.1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_tells_layers_apart(change: str) -> None:
    changed, part = Part(), Part()
    assert trace_key(part) == trace_key(changed) is not None
    CHANGES[change](changed)
    assert trace_key(part) != trace_key(changed)


@pytest.mark.parametrize(
    "change",
    [
        with_hook,
        lambda part: setattr(part, "helper", Object()),
        lambda part: setattr(part.linear, "forward", part.drop.forward),
        lambda part: part.register_buffer("large", torch.zeros(2**17)),
        lambda part: part.linear.weight.register_hook(lambda gradient: gradient),
        lambda part: part.linear.weight.register_post_accumulate_grad_hook(print),
        lambda part: setattr(part, "sparse", torch.zeros(2, 2).to_sparse()),
    ],
)
def test_of_what_is_nothing_known(change: Callable[[Part], object]) -> None:
    part = Part()
    change(part)
    assert trace_key(part) is None
    assert trace_key(nn.Sequential(part)) is None
