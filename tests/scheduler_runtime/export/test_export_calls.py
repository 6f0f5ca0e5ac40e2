"""Exports of modules whose parts, or which themselves, are called several times in a step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphs.trace import trace
from scheduler_runtime.export import to_torch_checkpoint
from scheduler_runtime.measuring import measure
from solver import solve
from solver.module_checkpointing.regions import RegionError, nodes_of
from tests.support.bitwise import assert_bitwise_identical


class _Twice(nn.Module):
    """Runs all of its parts twice in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x


class _Net(nn.Module):
    def __init__(self, *, n_calls: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Twice() for _ in range(3))
        self.n_calls = n_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for _ in range(self.n_calls):
                x = block(x)
        return x.square().mean()


@pytest.mark.slow
def test_a_module_called_once_is_checkpointed_though_its_parts_are_called_twice() -> None:
    torch.manual_seed(0)
    plain, batch = _Net(n_calls=1), (torch.randn(256, 16),)
    model = copy.deepcopy(plain)
    before = solve(model, batch, budget="1GB", time_limit_s=5)
    budget_bytes = int(0.8 * before.baseline.peak_bytes)
    plan = to_torch_checkpoint(model, solve(model, batch, budget=budget_bytes, time_limit_s=5))
    assert plan.fits
    assert any(module.path == "blocks.0" for module in plan.modules)
    assert measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes <= plan.peak_bytes
    assert_bitwise_identical(plain, model, batch)


def test_a_module_called_twice_in_a_row_is_refused() -> None:
    graph = trace(_Net(n_calls=2), (torch.randn(4, 16),))
    with pytest.raises(RegionError, match=r"'blocks\.0' is called several times in a step"):
        nodes_of(graph, "blocks.0")
    assert graph.meta.module_calls["blocks.0"] == 2
    assert graph.meta.module_calls["blocks.0.up"] == 4


class _Uncalled(nn.Module):
    """A block whose `step` is called, and not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.act = nn.Sequential(nn.GELU(), nn.Tanh(), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def _list_of_parts() -> nn.Module:
    """As in x-transformers."""
    return nn.ModuleList([nn.LayerNorm(16), _Twice()])


def _parts_as_attributes() -> nn.Module:
    """As in the autoencoders of latent diffusion."""
    level = nn.Module()
    level.norm, level.block = nn.LayerNorm(16), _Twice()
    return level


class _BlocksNeverCalled(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if isinstance(block, _Uncalled):
                x = block.step(x)
            else:
                norm, inside = block.children()
                x = x + inside(norm(x))
        return x.square().mean()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("kind", [_list_of_parts, _parts_as_attributes, _Uncalled])
def test_what_is_never_called_is_not_checkpointed_but_its_parts_are(
    kind: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    plain, batch = _BlocksNeverCalled(kind), (torch.randn(256, 16),)
    model = copy.deepcopy(plain)
    before = solve(model, batch, budget="1GB", time_limit_s=5)
    resident_bytes = before.graph.resident_bytes
    free_bytes = before.baseline.peak_bytes - resident_bytes
    solution = solve(
        model, batch, budget=int(resident_bytes + 0.8 * free_bytes), rewrites="none", time_limit_s=5
    )
    plan = to_torch_checkpoint(model, solution, on_excess="least")
    assert plan.modules
    assert not {module.path for module in plan.modules} & {f"blocks.{i}" for i in range(4)}
    measured_bytes = measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes
    assert measured_bytes <= plan.peak_bytes + 100
    assert_bitwise_identical(plain, model, batch)
