"""Plans before the training meets its shapes, and programs that are traced once."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from scheduler_runtime import fit, plan_ahead, plans_of
from scheduler_runtime.planned import forward
from tests.support.bitwise import assert_same_gradients
from tests.support.models import NormAndDropout


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that is made: whether it was traced."""
    calls: list[bool] = []
    trace = forward.trace_module

    def noted(*args: object, known: object = None, **options: object) -> object:
        calls.append(known is None)
        return trace(*args, known=known, **options)

    monkeypatch.setattr(forward, "trace_module", noted)
    return calls


@pytest.mark.slow
def test_shapes_are_planned_ahead_from_the_largest(
    traced: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    torch.manual_seed(0)
    plain = Net()
    model = fit(copy.deepcopy(plain), budget="20KB", optimizer=[])
    batches = [torch.randn(n, 16) for n in (24, 40, 32)]
    plans = plan_ahead(model, batches)
    shapes = [plan.solution.environment["shapes"] for plan in plans]
    assert shapes == [[[40, 16]], [[32, 16]], [[24, 16]]]
    assert all(p.grad is None for p in model.parameters())
    assert not caplog.records
    assert plan_ahead(model, batches[:1]) == plans
    for x in batches:
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        assert_same_gradients(plain, model)
    assert plans_of(model) == plans
    assert traced == [True] * 3


def test_what_cannot_be_planned_ahead() -> None:
    with pytest.raises(ValueError, match="fit was not called"):
        plan_ahead(Net(), [torch.randn(4, 16)])
    model = fit(Net(), budget="1MB", optimizer=[]).eval()
    with pytest.raises(ValueError, match="training mode"):
        plan_ahead(model, [torch.randn(4, 16)])


@pytest.mark.parametrize("one", [torch.randn(2, 4, 16), {"x": torch.randn(4, 16)}])
def test_one_batch_is_not_taken_for_several(one: object) -> None:
    model = fit(Net(), budget="1MB", optimizer=[])
    with pytest.raises(ValueError, match=r"plan_ahead\(model, \[batch\]\)"):
        plan_ahead(model, one)
    assert plans_of(model) == ()


def test_accumulation_is_planned_from_the_program_that_was_traced(traced: list[bool]) -> None:
    torch.manual_seed(0)
    plain = NormAndDropout()
    model = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    x, target = torch.randn(2, 6, 8)
    for each in (plain, model):
        torch.manual_seed(1)
        for _ in range(3):
            each(x, target)["loss"].backward()
    assert_same_gradients(plain, model)
    gradients = [plan.solution.environment["gradients"] for plan in plans_of(model)]
    assert gradients == ["fresh", "accumulate"]
    assert traced == [True, False]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("on_pressure", ["raise", "replan"])
def test_plans_do_not_keep_the_batch(on_pressure: str) -> None:
    model = fit(Net(), budget="1MB", optimizer=[], on_pressure=on_pressure)
    x = torch.randn(8, 16)
    batch = weakref.ref(x)
    model(x).backward()
    del x
    gc.collect()
    assert batch() is None
