"""What is one module, parameter or buffer, and what shares memory, may change between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphs.trace import TraceError
from scheduler_runtime import fit, plans_of
from scheduler_runtime.planned.module_tree import ModuleTree
from tests.support.bitwise import assert_same_gradients

pytestmark = pytest.mark.filterwarnings("ignore:fit. the optimizer's state is not counted")


class Towers(nn.Module):
    """Layers and buffers of one form each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[1] = self.layers[0]
        shift = torch.ones(8)
        self.register_buffer("first", shift)
        self.register_buffer("second", shift)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.mean.mul_(0.9)
        self.mean.add_(x.detach().mean(0))
        return (x * self.first + self.second.sin() * x - self.mean).square().mean()


def _assigned(model: Towers) -> None:
    """As after `torch.load`: names that shared a buffer have buffers of their own."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    values["second"] = 3 * values["second"]
    model.load_state_dict(values, assign=True)


CHANGES: dict[str, Callable[[Towers], Any]] = {
    "another layer is used twice": lambda m: m.layers.__setitem__(1, m.layers[2]),
    "a buffer of its own": lambda m: setattr(m, "second", torch.full((8,), 2.0)),
    "a state dict is assigned": _assigned,
    "a parameter of two layers": lambda m: setattr(m.layers[2], "bias", m.layers[0].bias),
    "a buffer that is written is one with another": lambda m: setattr(m, "second", m.mean),
}


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_other_sharing_is_another_program(change: Callable[[Towers], Any]) -> None:
    plain, x = Towers(), torch.randn(4, 8)
    planned = fit(copy.deepcopy(plain), budget="1GB")
    for model in (plain, planned):
        model(x).backward()
        change(model)
        model.zero_grad()
        model(x).backward()
    assert_same_gradients(plain, planned)
    assert torch.equal(plain.mean, planned.mean)
    assert len(plans_of(planned)) == 2


def test_memory_that_comes_to_be_shared_with_what_forward_writes_is_refused() -> None:
    model, x = fit(Towers(), budget="1GB"), torch.randn(4, 8)
    model(x).backward()
    model.zero_grad()
    model.mean = model.layers[2].bias.data
    with pytest.raises(TraceError, match=r"changes buffer 'mean' in place, which shares memory"):
        model(x)


def test_the_tree_is_in_pytorchs_order() -> None:
    model = nn.Sequential(Towers(), nn.ReLU(), nn.BatchNorm1d(8))
    model.append(model[1])
    model.none = None
    tree = ModuleTree.of(model)
    assert tree.modules == list(model.modules())
    assert list(map(id, tree.parameters)) == list(map(id, model.parameters()))
    assert list(map(id, tree.buffers)) == list(map(id, model.buffers()))
    assert (0, "3", tree.modules.index(model[1])) in tree.submodules


def test_a_deep_tree_needs_no_recursion() -> None:
    model: nn.Module = nn.Identity()
    for _ in range(2000):
        model = nn.Sequential(model)
    assert len(ModuleTree.of(model).modules) == 2001
