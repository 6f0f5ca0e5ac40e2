"""Check that training steps with and without a plan are bitwise identical."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from graphs.graph import Graph
from graphs.model_calls.call import as_call, find_loss
from graphs.trace import trace
from solver.schedule import Places, Request, Schedule, Solution, baseline, simulate
from tests.support.models import (
    Classifier,
    ConvNet,
    Encoder,
    NormAndDropout,
    Recurrent,
    SharedGradients,
    TiedLanguageModel,
)

MODELS: list[type] = [
    NormAndDropout,
    TiedLanguageModel,
    ConvNet,
    Classifier,
    SharedGradients,
    Encoder,
    Recurrent,
]
LARGE = 10**12


def solution_of(
    graph: Graph, schedule: Schedule, *, budget_bytes: int = LARGE, places: Places | None = None
) -> Solution:
    """A Solution with this schedule."""
    places = places or Places()
    plain = simulate(graph, baseline(graph))
    simulation = simulate(graph, schedule, places=places)
    request = Request(budget_bytes, places=places)
    return Solution(
        "feasible", graph, schedule, simulation, request, plain, plain.time_s, "test", 0.0
    )


def traced(make: Any, **options: Any) -> tuple[nn.Module, Any, Graph]:
    torch.manual_seed(0)
    model = make()
    graph = trace(model, make.batch(), loss=getattr(make, "loss", None), **options)
    return model, make.batch(), graph


def one_step(model: nn.Module, batch: Any, seed: int, loss: Any = None) -> list[Any]:
    """Run one forward and backward pass: loss, gradients, buffers and the random state after it."""
    torch.manual_seed(seed)
    args, kwargs = as_call(batch)
    output = model(*args, **kwargs)
    value = find_loss(output) if loss is None else loss(output, batch)
    value.backward()
    return [
        value.detach().clone(),
        *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
        *(b.clone() for b in model.buffers()),
        torch.get_rng_state(),
    ]


def assert_equal(
    expected: Iterable[torch.Tensor | None], got: Iterable[torch.Tensor | None]
) -> None:
    pairs = [*zip(expected, got, strict=True)]
    assert pairs, "nothing is compared"
    for one, other in pairs:
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def are_equal(expected: Iterable[torch.Tensor | None], got: Iterable[torch.Tensor | None]) -> bool:
    try:
        assert_equal(expected, got)
    except (AssertionError, ValueError):
        return False
    return True


def assert_same_gradients(plain: nn.Module, planned: nn.Module) -> None:
    gradients = [[p.grad for p in model.parameters()] for model in (plain, planned)]
    assert any(gradient is not None for gradient in gradients[0])
    assert_equal(*gradients)


def assert_bitwise_identical(
    plain: nn.Module, planned: nn.Module, batch: Any, loss: Any = None
) -> None:
    """Assert that three optimizer steps of both modules are bitwise identical."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, planned)]
    for seed in range(3):
        results = []
        for model, optimizer in zip((plain, planned), optimizers, strict=True):
            optimizer.zero_grad()
            results.append(one_step(model, batch, seed, loss))
            optimizer.step()
        assert_equal(*results)
    assert_equal(plain.parameters(), planned.parameters())
