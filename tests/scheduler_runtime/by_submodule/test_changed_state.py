"""Submodules whose forward pass changes state, run by stock checkpointing: it is changed once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scheduler_runtime import apply
from scheduler_runtime.by_submodule.planning import plan_chain
from scheduler_runtime.measuring import measure
from tests.support.bitwise import assert_equal, one_step


class Network(nn.Module):
    """Runs modules one after the other. together: as the children of an nn.Sequential."""

    def __init__(self, parts: list[nn.Module], together: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts) if together else nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.parts, nn.Sequential):
            return self.parts(x).sum()
        for part in self.parts:
            x = part(x)
        return x.sum()


class Changing(nn.Module):
    """Reads a parameter or a buffer that it changes. how: which."""

    def __init__(self, how: str, width: int = 64) -> None:
        super().__init__()
        self.part, self.how = nn.Linear(width, width), how
        self.scale = nn.Parameter(torch.ones(width), requires_grad=how != "frozen parameter")
        if how == "spectral norm":
            self.part = nn.utils.parametrizations.spectral_norm(self.part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how != "spectral norm":
            with torch.no_grad():
                self.scale.mul_(0.9)
        x = x * self.scale if x.sum().item() < 1e9 else x
        return self.part(x).exp().log().relu()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parameter", "frozen parameter", "spectral norm"])
@pytest.mark.parametrize("together", [False, True])
def test_recomputation_reads_the_changed_state_that_forward_read(how: str, together: bool) -> None:
    torch.manual_seed(0)
    plain, batch = Network([Changing(how) for _ in range(6)], together), torch.randn(512, 64)
    model, before = copy.deepcopy(plain), copy.deepcopy(plain.state_dict())
    plain_bytes = measure(copy.deepcopy(plain), batch, n_steps=1).peak_bytes
    solution = plan_chain(model, batch, budget=int(0.75 * plain_bytes))
    assert_equal(before.values(), model.state_dict().values())
    assert solution.checkpointed
    apply(model, solution)
    for seed in range(2):
        assert_equal(one_step(plain, batch, seed), one_step(model, batch, seed))
        assert_equal(plain.state_dict().values(), model.state_dict().values())


class Counting(nn.Module):
    """Counts its calls, in a buffer that it reaches in one of several ways. Cannot be traced."""

    def __init__(self, norm: nn.Module, reach: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.part, self.norm, self.reach = nn.Linear(64, 64), norm, reach
        self.register_buffer("count", torch.ones(()))
        self.alias, self.in_list, self.view = self.count, [self.count], self.count.view(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.reach(self)
        with torch.no_grad():
            count.mul_(2)
        x = self.norm(x) if x.sum().item() < 1e9 else x
        return self.part(x * count).exp().log().relu()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("reach", [lambda m: m.count, lambda m: m.alias])
def test_state_with_two_names_changes_once(reach: Callable[[Any], torch.Tensor]) -> None:
    """A shared batch norm, and a buffer that is a plain attribute, too."""
    torch.manual_seed(0)
    norm, batch = nn.BatchNorm1d(64), torch.randn(512, 64)
    plain = Network([Counting(norm, reach) for _ in range(4)], together=False)
    model = copy.deepcopy(plain)
    plain_bytes = measure(copy.deepcopy(plain), batch, n_steps=1).peak_bytes
    solution = plan_chain(model, batch, budget=int(0.75 * plain_bytes))
    assert len(solution.checkpointed) > 1
    apply(model, solution)
    for seed in range(2):
        assert_equal(one_step(plain, batch, seed), one_step(model, batch, seed))
        assert_equal(plain.state_dict().values(), model.state_dict().values())


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("reach", [lambda m: m.in_list[0], lambda m: m.view])
def test_state_that_is_changed_behind_its_attribute_is_refused(
    reach: Callable[[Any], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    model = Network([Counting(nn.Identity(), reach) for _ in range(4)], together=False)
    batch, before = torch.randn(512, 64), copy.deepcopy(model.state_dict())
    plain_bytes = measure(copy.deepcopy(model), batch, n_steps=1).peak_bytes
    with pytest.raises(RuntimeError, match=r"changed 'count' a second time, .*\(a list"):
        plan_chain(model, batch, budget=int(0.75 * plain_bytes))
    assert_equal(before.values(), model.state_dict().values())
