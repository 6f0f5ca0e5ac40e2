"""torch.compile within a budget, for steps that take gradients of gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import GraphBreakError, compile, compile_reports
from tests.scheduler_runtime.compiler.test_compile import bits, plainly, same_bits


class ForceField(nn.Module):
    """An energy and its gradient with respect to the positions, the forces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def energy(self, positions: torch.Tensor) -> torch.Tensor:
        hidden = positions
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden.square().sum()

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(self.energy)(positions).square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(256, 16, generator=torch.Generator().manual_seed(0))


class WithAutograd(ForceField):
    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions = positions.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(positions), positions, create_graph=True)
        return forces.square().mean()


class TransposedWeights(nn.Module):
    """Autograd copies the gradients, which have other strides than the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight.t().contiguous())).square().sin()
        return x.mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [ForceField, TransposedWeights])
def test_the_budget_is_kept_and_the_bits_are_those_without_one(kind):
    model, batch = kind(), kind.batch()
    twin = copy.deepcopy(model)
    plain = bits(twin, batch, plainly(twin, "aot_eager"))
    free = compile(copy.deepcopy(model), batch, budget="1GB", backend="aot_eager")
    (report,) = compile_reports(free)
    budget_bytes = int(report.chosen.measured_bytes * 0.75)
    compile(model, batch, budget=budget_bytes, backend="aot_eager")
    assert same_bits(plain, bits(model, batch, model))
    (report,) = compile_reports(model)
    assert report.chosen.partition.n_recomputed
    assert report.chosen.measured_bytes <= budget_bytes


def test_a_gradient_by_autograd_is_refused_with_what_to_do():
    by_default = torch._dynamo.config.patch(trace_autograd_ops=False)
    with by_default, pytest.raises(GraphBreakError, match=r"torch\.func\.grad .* solve and apply"):
        compile(WithAutograd(), WithAutograd.batch(), budget="1GB", backend="aot_eager")
