"""The graphs that `benchmarks.plan_quality` plans, by name, and how each is made.

They are traced on fake tensors with an H100's roofline, so nothing is allocated, or synthetic: made
from numbers. Traced steps have no optimizer state, which would be the same bytes at every budget.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.written import densenet121
from examples import resnet50
from graphs.costs import Roofline
from graphs.graph import Graph
from graphs.hardware import named
from graphs.model_calls import Call, as_call
from graphs.rewrites import Variants, allowed_variants, variants_of
from graphs.synthetic import nets
from graphs.trace import CapturedStep, loss_index, trace_module

INSTANCE = Path(__file__).parents[2] / "tests" / "data" / "gpt2_small_b8_t1024.json"


# Keeps the models alive: a step's variants are traced from its model. On the meta device, models
# take no memory.
_MODELS: list[nn.Module] = []


def capture_step(model: nn.Module, batch: Any) -> CapturedStep:
    """Trace the training step of a model whose forward returns the loss."""
    _MODELS.append(model)
    return trace_module(
        model,
        Call.of(*as_call(batch)),
        device=torch.device("cpu"),
        choose=loss_index,
        gradients="fresh",
        costs=Roofline(named("h100")),
    )


def variants(step: CapturedStep) -> Variants:
    """The step with and without the rewrites that keep all bits, as `solve` plans it by default."""
    planned = variants_of("bitwise")
    traced = [(each.graph, each.captured) for each in step.variants(planned)]
    return allowed_variants(traced, planned)


def example(
    name: str, *, batch: Mapping[str, int] | None = None, **sizes: Any
) -> Callable[[], CapturedStep]:
    """A function that traces a model of `examples/`.

    batch: arguments of the example's `get_batch`.
    sizes: arguments of its `get_model`.
    """

    def capture() -> CapturedStep:
        # Imported only now: the Llama example needs transformers.
        module = importlib.import_module(f"examples.{name}")
        with torch.device("meta"):
            return capture_step(module.get_model(**sizes), module.get_batch(**batch or {}))

    return capture


def _densenet() -> CapturedStep:
    with torch.device("meta"):
        return capture_step(densenet121(), resnet50.get_batch())


GRAPHS: dict[str, Callable[[], Graph | CapturedStep]] = {
    "gpt2-instance": lambda: Graph.load(INSTANCE),
    "gpt2": example("gpt2"),
    "llama-4": example("llama", n_layers=4),
    "llama-16": example("llama", n_layers=16),
    "llama-32": example("llama", n_layers=32),
    "llama-80": example("llama", n_layers=80),
    "resnet50": example("resnet50"),
    "resnet101": example("resnet50", depths=(3, 4, 23, 3)),
    "unet": example("unet"),
    "densenet121": _densenet,
    "vit-base": example("vit"),
    "vit-large": example("vit", n_layers=24, width=1024, n_heads=16),
    "lstm-200": example("lstm"),
    "lstm-2000": lambda: nets.recurrent(n_steps=2000),
    "residual-1000": lambda: nets.residual(n_blocks=1000),
}
"""The last two are synthetic."""
