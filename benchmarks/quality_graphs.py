"""The graphs that `benchmarks.plan_quality` plans, by name, and how each is made.

Traced on fake tensors with an H100's roofline, so nothing is allocated; `synthetic` ones are made
from numbers. The traced step has no optimizer state: it is the same bytes at every budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples import gpt2, llama, lstm, resnet50, unet, vit
from graphs.calls import Call, as_call
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import named
from graphs.synthetic import nets
from graphs.trace import CapturedStep, loss_index, trace_module

INSTANCE = Path(__file__).parents[1] / "tests" / "data" / "gpt2_small_b8_t1024.json"


class DenseNet(nn.Module):
    """DenseNet-121 (Huang et al. 2016): each layer reads what all layers before it in its block
    made.
    """

    def __init__(self, *, depths: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.ModuleList()
        self.shrink = nn.ModuleList()
        for depth in depths:
            layers = nn.ModuleList()
            for _ in range(depth):
                layers.append(_dense_layer(width, growth))
                width += growth
            self.blocks.append(layers)
            self.shrink.append(_transition(width, width // 2))
            width //= 2
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for layers, shrink in zip(self.blocks, self.shrink, strict=True):
            made = [x]
            for layer in layers:
                made.append(layer(torch.cat(made, dim=1)))
            x = shrink(torch.cat(made, dim=1))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _dense_layer(n_in: int, growth: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(n_in),
        nn.ReLU(),
        nn.Conv2d(n_in, 4 * growth, 1, bias=False),
        nn.BatchNorm2d(4 * growth),
        nn.ReLU(),
        nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
    )


def _transition(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(n_in), nn.ReLU(), nn.Conv2d(n_in, n_out, 1, bias=False), nn.AvgPool2d(2)
    )


@dataclass(frozen=True)
class Subject:
    """A graph to plan. step: what it was traced into (None: it comes from a file or numbers)."""

    graph: Graph
    step: CapturedStep | None = None


def _traced(
    module: Any, model: Mapping[str, Any] | None = None, batch: Mapping[str, Any] | None = None
) -> Subject:
    with torch.device("meta"):
        return _step(module.get_model(**(model or {})), module.get_batch(**(batch or {})))


def _densenet() -> Subject:
    with torch.device("meta"):
        return _step(DenseNet(), resnet50.get_batch())


def _step(model: nn.Module, batch: Any) -> Subject:
    step = trace_module(
        model,
        Call.of(*as_call(batch)),
        device=torch.device("cpu"),
        choose=loss_index,
        gradients="fresh",
        costs=Roofline(named("h100")),
    )
    return Subject(step.graph, step)


def _llama(n_layers: int) -> Subject:
    return _traced(llama, {"n_layers": n_layers})


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt2-instance": lambda: Subject(Graph.load(INSTANCE)),
    "gpt2": lambda: _traced(gpt2),
    "llama-4": lambda: _llama(4),
    "llama-16": lambda: _llama(16),
    "llama-32": lambda: _llama(32),
    "llama-80": lambda: _llama(80),
    "resnet50": lambda: _traced(resnet50),
    "resnet101": lambda: _traced(resnet50, {"depths": (3, 4, 23, 3)}),
    "unet": lambda: _traced(unet),
    "densenet121": _densenet,
    "vit-base": lambda: _traced(vit),
    "vit-large": lambda: _traced(vit, {"n_layers": 24, "width": 1024, "n_heads": 16}),
    "lstm-200": lambda: _traced(lstm),
    "lstm-2000": lambda: Subject(nets.recurrent(n_steps=2000)),
    "residual-1000": lambda: Subject(nets.residual(n_blocks=1000)),
}
"""The last two are synthetic."""
