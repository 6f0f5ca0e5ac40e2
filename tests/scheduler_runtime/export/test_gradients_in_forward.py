"""Exports of steps in which forward takes gradients itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler_runtime import measure
from scheduler_runtime.export import ExportError, to_saved_tensors_hooks, to_torch_checkpoint
from solver import solve
from tests.support.bitwise import assert_equal

N_LAYERS = 6


class Mixed(nn.Module):
    """Layers whose output's gradient with respect to the input is part of the loss, and others."""

    def __init__(self, *, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(*(self._layer() for _ in range(N_LAYERS)))
        self.others = nn.ModuleList(self._layer() for _ in range(N_LAYERS))
        self.way = way

    @staticmethod
    def _layer() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "autograd":
            x = x.detach().requires_grad_()
            slope = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)[0]
        elif self.way == "func":
            slope = torch.func.grad(lambda point: self.inner(point).sum())(x)
        else:
            slope = torch.func.vmap(self.inner)(x)
        x = x.detach()
        for layer in self.others:
            x = x + layer(x)
        return x.square().mean() + slope.square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


def after_a_step(model: nn.Module) -> list[torch.Tensor]:
    loss = model(Mixed.batch())
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("way", ["autograd", "func", "vmap"])
def test_only_modules_outside_of_such_gradients_are_checkpointed(way):
    plain = after_a_step(Mixed(way=way))
    model = Mixed(way=way)
    free = solve(model, Mixed.batch(), budget="1GB", rewrites="none")
    assert "inner" in free.graph.meta.differentiated_modules
    budget_bytes = int(0.85 * free.simulation.peak_bytes)
    solution = solve(model, Mixed.batch(), budget=budget_bytes, rewrites="none")
    exported = to_torch_checkpoint(model, solution, on_excess="least")
    assert exported.modules
    assert all(module.path.startswith("others") for module in exported.modules)
    assert "forward itself takes gradients" in str(exported)
    assert_equal(plain, after_a_step(model))
    model.zero_grad()
    assert measure(model, Mixed.batch()).peak_bytes <= exported.peak_bytes + 100


@pytest.mark.parametrize("way", ["autograd", "func"])
def test_hooks_of_saved_tensors_are_refused(way):
    model = Mixed(way=way)
    free = solve(model, Mixed.batch(), budget="1GB")
    budget_bytes = int(0.8 * free.simulation.peak_bytes)
    solution = solve(model, Mixed.batch(), budget=budget_bytes, host_budget="1GB")
    with pytest.raises(ExportError, match=r"forward itself takes gradients .* use apply"):
        to_saved_tensors_hooks(model, solution, on_excess="least")


def test_if_nothing_fits_the_error_says_why():
    model = Mixed(way="func")
    model.others = nn.ModuleList()
    free = solve(model, Mixed.batch(), budget="1GB", rewrites="none")
    budget_bytes = int(0.8 * free.simulation.peak_bytes)
    solution = solve(model, Mixed.batch(), budget=budget_bytes, rewrites="none")
    with pytest.raises(ExportError, match="forward itself takes gradients"):
        to_torch_checkpoint(model, solution)
