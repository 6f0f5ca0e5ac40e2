"""Leaves that forward makes: eager mode computes their gradients, which a plan leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime.measuring import measure
from solver import solve


class ForceField(nn.Module):
    """Energies of pairs of atoms, and the forces on these.

    makes_leaf: whether forward differentiates with respect to a leaf of its own, or to a tensor
        that has a gradient anyway.
    """

    def __init__(self, *, makes_leaf: bool = True) -> None:
        super().__init__()
        self.makes_leaf = makes_leaf
        self.shift = nn.Parameter(torch.zeros(3))
        self.register_buffer("centers", torch.linspace(0, 4, 16))
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def forward(
        self, positions: torch.Tensor, pairs: torch.Tensor, forces: torch.Tensor
    ) -> torch.Tensor:
        if self.makes_leaf:
            positions = positions.detach().requires_grad_()
        else:
            positions = positions * self.shift.exp()
        one, other = pairs
        distances = torch.linalg.norm(positions[one] - positions[other], dim=-1, keepdim=True)
        weights = 0.5 * torch.cos(distances * 0.6) + 0.5
        energy = self.layers((-4 * (distances - self.centers).square()).exp()) * weights
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        loss: torch.Tensor = F.mse_loss(-slope, forces) + energy.mean().square()
        return loss


class Critic(nn.Module):
    """The leaf's gradient is one of several results of the convolution's backward operator, and
    the weights have other uses, so that their gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last = nn.Linear(16, 1)

    def value(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(images))).mean((2, 3)))

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.value(mixed).sum(), mixed, create_graph=True)
        loss: torch.Tensor = self.value(real).mean() - self.value(fake).mean()
        return loss + slope.square().mean()


def batch(n_pairs: int = 2000) -> tuple[torch.Tensor, ...]:
    one = torch.randint(0, 100, (n_pairs,))
    pairs = torch.stack([one, (one + torch.randint(1, 100, (n_pairs,))) % 100])
    return torch.randn(100, 3), pairs, torch.randn(100, 3)


@pytest.mark.parametrize("makes_leaf", [True, False])
def test_the_baseline_is_the_measured_step(makes_leaf: bool) -> None:
    model, inputs = ForceField(makes_leaf=makes_leaf), batch()
    solution = solve(model, inputs, budget="1TB")
    assert bool(solution.plain.meta.dead_gradients) == makes_leaf
    measured_bytes = measure(model, inputs, n_steps=1).peak_bytes
    assert measured_bytes == pytest.approx(solution.baseline.peak_bytes, rel=2e-4)


def test_a_leaf_before_an_operator_with_several_gradients() -> None:
    model, inputs = Critic(), (torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16))
    solution = solve(model, inputs, budget="1TB")
    ((_, made),) = solution.plain.meta.dead_gradients.items()
    assert (made["operator"], made["size_bytes"]) == (None, inputs[0].nbytes)
    measured_bytes = measure(model, inputs, n_steps=1).peak_bytes
    assert measured_bytes == pytest.approx(solution.baseline.peak_bytes, rel=1e-3)


def test_what_is_only_for_the_leaf_is_not_part_of_the_plan(tmp_path: Path) -> None:
    graph = trace(ForceField(), batch())
    dead = graph.meta.dead_gradients
    assert {"aten.mul.Tensor", "aten.sum.dim_IntList"} <= {d["operator"] for d in dead.values()}
    assert not dead.keys() & {*graph.node_by_name, *graph.tensor_by_name}
    graph.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json").meta.dead_gradients == dead
