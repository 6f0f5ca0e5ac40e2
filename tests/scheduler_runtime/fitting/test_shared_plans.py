"""Copies of a fitted module, made anew in each step: planned once, each on its own parameters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from scheduler_runtime import fit, plans_of
from scheduler_runtime.fitting.shared_plans import SharedPlans
from solver.solving import solve
from tests.support.bitwise import assert_equal

BATCH = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """Reads a plain attribute, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
        self.net, self.scale = nn.Sequential(*layers), 1.0
        self.table: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.scale * self.net(x)
        return (made if self.table is None else made + self.table).square().mean()


def model_with_plans() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def budget() -> int:
    solution = solve(model_with_plans(), BATCH, budget="1GB")
    peak, resident = solution.simulation.peak_bytes, solution.graph.resident_bytes  # type: ignore[union-attr]
    return (peak + resident) // 2 + resident // 2


def meta_trained(model: nn.Module, *, n_steps: int = 2) -> list[torch.Tensor]:
    """First-order meta-learning: copies take two steps each, the model theirs together."""
    seen = []
    for _ in range(n_steps):
        for parameter in model.parameters():
            parameter.grad = None
        for _ in range(2):
            fast = copy.deepcopy(model)
            for parameter in fast.parameters():
                parameter.grad = None
            optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = fast(BATCH)
                loss.backward()
                optimizer.step()
                seen.append(loss.detach())
            for parameter, other in zip(model.parameters(), fast.parameters(), strict=True):
                parameter.grad = other.grad
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that have been traced."""
    from scheduler_runtime.planned import forward

    found: list[nn.Module] = []
    original = forward.trace_module
    monkeypatch.setattr(
        forward, "trace_module", lambda m, *a, **k: found.append(m) or original(m, *a, **k)
    )
    return found


def test_copies_are_planned_once_with_all_bits(traced: list[nn.Module]) -> None:
    plain, fitted = model_with_plans(), model_with_plans()
    fit(fitted, budget=budget(), optimizer=None)
    assert_equal(meta_trained(plain), meta_trained(fitted))
    assert len(traced) == 1
    assert plans_of(fitted) == ()


def test_copies_that_share_a_plan_say_so_in_plans_of() -> None:
    model = model_with_plans()
    fit(model, budget="1GB")
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    for each in (first, second):
        each(BATCH).backward()
    assert plans_of(first) == plans_of(second) != ()


def _set_attribute(model: Any) -> None:
    model.scale = 2.0


def _replace_layer(model: Any) -> None:
    model.net[1] = nn.ReLU()


def _freeze(model: Any) -> None:
    model.net[0].weight.requires_grad_(False)


def _keep_tensor(model: Any) -> None:
    model.table = torch.randn(32)


@pytest.mark.parametrize("change", [_set_attribute, _replace_layer, _freeze, _keep_tensor])
def test_a_copy_that_was_changed_has_a_plan_of_its_own(
    change: Any, traced: list[nn.Module]
) -> None:
    model = model_with_plans()
    fit(model, budget="1GB")
    copy.deepcopy(model)(BATCH).backward()
    for _ in range(2):  # a tensor in an attribute is another one in each copy
        other, plain = copy.deepcopy(model), model_with_plans()
        change(other)
        change(plain)
        plain.table = other.table
        for each in (other, plain):
            each(BATCH).backward()
        for one, expected in zip(other.parameters(), plain.parameters(), strict=True):
            assert one.grad is expected.grad or torch.equal(one.grad, expected.grad)
    assert len(traced) == (3 if change is _keep_tensor else 2)


def test_the_plan_of_the_original_is_not_shared(traced: list[nn.Module]) -> None:
    """It counts the optimizer, which trains the original alone."""
    model = model_with_plans()
    fit(model, budget="1GB", optimizer=torch.optim.AdamW(model.parameters()))
    model(BATCH).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(BATCH).backward()
    assert len(traced) == 2


def test_another_process_has_no_plans() -> None:
    assert pickle.loads(pickle.dumps(SharedPlans())) is not None
    plans = SharedPlans()
    assert copy.deepcopy(plans) is plans
