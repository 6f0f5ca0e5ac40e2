"""Steps that differentiate a gradient, which `forward` takes itself with `create_graph=True`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo.derivatives import Adapted, Burgers, with_checkpoints
from scheduler_runtime import apply, fit
from scheduler_runtime.measuring import measure
from solver import solve
from tests.support.bitwise import assert_equal
from tests.support.example_models import small

MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gradient penalty": lambda: small("gradient_penalty"),
    "meta-learning": lambda: (
        Adapted(width=32, n_layers=3, n_steps=2),
        tuple(torch.randn(4, 128, 32)),
    ),
    "force field": lambda: small("force_field"),
    "Burgers' equation": lambda: (Burgers(width=32, n_layers=4), tuple(torch.rand(2, 256))),
}


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


def trained(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Two steps: each loss, its gradients, and the random state after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss.backward()
        found += [loss.detach(), torch.get_rng_state()]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", MODELS)
def test_at_half_of_the_activations_the_bits_are_the_same(name: str) -> None:
    plain, batch = made(name)
    free = solve(plain, batch, budget="1GB", reserve=0)
    resident_bytes = free.graph.resident_bytes
    budget_bytes = (resident_bytes + free.baseline.peak_bytes) // 2
    solution = solve(free.graph, budget=budget_bytes, reserve=0, time_limit_s=600)
    assert solution.simulation.n_recomputed > 0
    model = apply(copy.deepcopy(plain), solution)
    assert measure(model, batch, n_steps=1).peak_bytes <= solution.simulation.peak_bytes
    assert_equal(trained(copy.deepcopy(plain), batch), trained(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_fit_and_the_plain_step(name: str) -> None:
    plain, batch = made(name)
    model = fit(copy.deepcopy(plain), budget="1GB")
    free = solve(plain, batch, budget="1GB", reserve=0)
    measured_bytes = measure(copy.deepcopy(plain), batch, n_steps=1).peak_bytes
    assert 0.9995 * measured_bytes <= free.baseline.peak_bytes <= 1.01 * measured_bytes
    assert_equal(trained(copy.deepcopy(plain), batch), trained(model, batch))


@pytest.mark.slow
def test_checkpoints_of_pytorch_save_less_memory_than_a_plan() -> None:
    """A backward pass with create_graph=True keeps what they recompute."""
    plain, batch = made("force field")
    free = solve(plain, batch, budget="1GB", reserve=0)
    least_bytes = solve(free.graph, budget=1).minimum_budget_bytes
    checkpointed = measure(with_checkpoints("force field", plain), batch, n_steps=1).peak_bytes
    assert least_bytes < checkpointed / 2


def test_outside_of_the_planned_module_it_is_refused() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    apply(layer, solve(layer, x, budget="1GB", loss=lambda out, _: out.sum()))
    with pytest.raises(RuntimeError, match="in the forward of a module around this one"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
