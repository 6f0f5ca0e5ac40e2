"""`on_pressure="replan"`: a step in which memory runs short runs again, with the same bits."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import attempt, fit, plans_of
from scheduler_runtime.fitting import pressure, tighter_plans
from solver.sizes_deadlines_progress import format_size_up
from tests.support.bitwise import assert_equal
from tests.support.full_device import FailingOperators, SmallDevice
from tests.support.paths import ROOT

N_ROWS = 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.norm(self.inner(x)))
        return x + self.outer(F.dropout(hidden, 0.2, self.training))


class Net(nn.Module):
    """Batch norm, dropout, two inputs; the loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x * scale)
        return self.head(x)


class WithLoss(Net):
    """The same, and the loss inside."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return criterion(super().forward(x, scale))


def criterion(output: torch.Tensor) -> torch.Tensor:
    if output.dim() == 0:
        return output
    return F.cross_entropy(output.float(), torch.arange(N_ROWS) % 10)


def model_of(kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def fitted(model: nn.Module, **options: Any) -> Any:
    fit(model, **{"budget": "10MB", "on_pressure": "replan", **options})
    with pytest.warns(UserWarning, match="state is not counted"):
        step(model, Case())
    model.zero_grad()
    return model


class Case:
    """accumulates: gradients exist. autocast: bf16. kind: of the model."""

    def __init__(
        self, *, accumulates: bool = False, autocast: bool = False, kind: type[nn.Module] = Net
    ) -> None:
        self.accumulates, self.autocast, self.kind = accumulates, autocast, kind


def step(model: nn.Module, case: Case, mode: Any = None, *, attempts: bool = False) -> list[Any]:
    """Values, gradients, buffers and random state after one step. mode: around its operators."""
    torch.manual_seed(1)
    x, scale = torch.randn(N_ROWS, 16, requires_grad=True), torch.rand(16)
    model.zero_grad()
    if case.accumulates:
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
            loss = criterion(model(x, scale))
        torch.rand(3)  # the loop draws numbers between forward and backward
        loss.backward()
        return loss.detach()

    with mode or nullcontext():
        loss = attempt(model, run) if attempts else run()
    state = [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return [loss, x.grad, *state, torch.get_rng_state()]


def from_start(model: Any, state: dict[str, Any]) -> None:
    """Parameters and buffers as at first, and the fastest plan."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(state[name])
    model.forward._pressure.limit_bytes = None


CASES = {
    "fresh": Case(),
    "accumulates": Case(accumulates=True),
    "autocast": Case(autocast=True),
    "loss inside": Case(kind=WithLoss),
    "accumulates under autocast": Case(accumulates=True, autocast=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_error_in_any_operator_of_the_step_leaves_the_bits(name: str) -> None:
    """In the forward pass, the loss, its backward pass and the model's."""
    case = CASES[name]
    plain = model_of(case.kind)
    state = copy.deepcopy(plain.state_dict())
    expected = step(plain, case)
    model = fitted(model_of(case.kind))
    step(model, case)
    from_start(model, state)
    counted = FailingOperators()
    assert_equal(expected, step(model, case, counted, attempts=True))
    for at in range(0, len(counted.names), 3):
        from_start(model, state)
        mode = FailingOperators([at])
        assert_equal(expected, step(model, case, mode, attempts=True))
        assert mode.n_raised == 1
    assert len(plans_of(model)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Net, WithLoss])
def test_without_attempt_the_passes_of_the_model_run_again(kind: type[nn.Module]) -> None:
    case = Case(kind=kind)
    plain = model_of(kind)
    state = copy.deepcopy(plain.state_dict())
    expected = step(plain, case)
    model = fitted(model_of(kind))
    counted = FailingOperators()
    step(model, case, counted)
    n_raised = 0
    for at in range(1, len(counted.names), 5):
        from_start(model, state)
        try:
            assert_equal(expected, step(model, case, FailingOperators([at])))
        except torch.OutOfMemoryError:
            n_raised += 1
            # in the loss, whose operators are the caller's, or in `loss.backward()` itself
            assert kind is Net or "ones_like" in counted.names[at]
    assert n_raised <= 3


@pytest.mark.slow
def test_several_errors_in_one_step_and_the_least_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Each time the plan is tighter, until there is none: then the error comes as it was."""
    case, plain = Case(kind=WithLoss), model_of(WithLoss)
    state = copy.deepcopy(plain.state_dict())
    expected = step(plain, case)
    model = fitted(model_of(WithLoss))
    from_start(model, state)
    caplog.clear()
    assert_equal(expected, step(model, case, FailingOperators([20, 40])))
    lines = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    assert len(lines) == 2
    assert all("runs again with a plan of" in line for line in lines)
    with pytest.raises(torch.OutOfMemoryError, match=r"operator 2\d*") as caught:
        step(model, case, FailingOperators(range(20, 10**6)))
    (note,) = caught.value.__notes__
    assert "no tighter one" in note
    peaks = [each.solution.simulation.peak_bytes for each in plans_of(model)]
    assert f"a plan of {format_size_up(min(peaks))} " in note
    assert len(set(peaks)) == len(peaks) < 12
    from_start(model, state)
    assert_equal(expected, step(model, case))


@pytest.mark.slow
def test_other_errors_are_raised_and_the_default_raises_all() -> None:
    model = fitted(model_of())
    with pytest.raises(ZeroDivisionError):
        attempt(model, lambda: 1 // 0)
    plain = fitted(model_of(), on_pressure="raise")
    with pytest.raises(torch.OutOfMemoryError, match="operator 2,"):
        step(plain, Case(), FailingOperators([2]))
    with pytest.raises(ValueError, match='on_pressure="replan"'):
        attempt(plain, lambda: None)
    with pytest.raises(ValueError, match="on_pressure is 'retry'; one of raise, replan"):
        fit(model_of(), budget="1MB", on_pressure="retry")


@pytest.mark.slow
def test_on_a_device_that_is_too_small_the_steps_end_within_it() -> None:
    case, plain = Case(kind=WithLoss), model_of(WithLoss)
    expected = [step(plain, case) for _ in range(4)]
    model = model_of(WithLoss)
    state = copy.deepcopy(model.state_dict())
    model = fitted(model)
    from_start(model, state)
    free = SmallDevice(10**9)
    step(model, case, free)
    from_start(model, state)
    small = SmallDevice(int(0.75 * free.peak_bytes))
    for each in expected:
        assert_equal(each, step(model, case, small))
    assert 0 < small.n_errors <= 3
    assert small.peak_bytes <= small.capacity_bytes < free.peak_bytes
    n_errors = small.n_errors
    step(model, case, small)
    assert small.n_errors == n_errors


@pytest.mark.slow
def test_when_room_returns_the_faster_plan_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pressure, "N_CALM", 3)
    model = fitted(model_of())
    steps = model.forward._pressure
    step(model, Case(), FailingOperators([20]))
    assert steps.limit_bytes is not None
    caplog.clear()
    n_tight = run_until(model, lambda: steps.limit_bytes is None)
    assert n_tight == 4
    assert "back to a plan of" in caplog.text
    step(model, Case(), FailingOperators([20]))  # too early: it waits for longer
    assert run_until(model, lambda: steps.limit_bytes is None) == 7


def run_until(model: nn.Module, ended: Callable[[], bool]) -> int:
    for n in range(1, 100):
        step(model, Case())
        if ended():
            return n
    raise AssertionError


def test_less_room_on_the_device_is_seen_before_the_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A CUDA device says how much is free; here a function does."""
    monkeypatch.setattr(pressure, "N_CALM", 2)
    plain, model = model_of(), fitted(model_of(), reserve="10KB")
    state, (first,) = copy.deepcopy(plain.state_dict()), plans_of(model)
    solution = first.solution
    growth_bytes = solution.simulation.peak_bytes - solution.graph.resident_bytes
    room = growth_bytes + 10_000
    monkeypatch.setattr(tighter_plans, "room_bytes", lambda _device: room)
    from_start(model, state)
    step(model, Case())
    assert len(plans_of(model)) == 1
    room = growth_bytes - 20_000
    from_start(model, state)
    assert_equal(step(plain, Case()), step(model, Case()))
    second = plans_of(model)[1].solution
    assert second.simulation.peak_bytes <= second.graph.resident_bytes + room - 10_000
    assert "are free on the device, too little for a plan of" in caplog.text
    assert model.forward._pressure.limit_bytes is not None
    for _ in range(6):
        step(model, Case())
    assert model.forward._pressure.limit_bytes is not None  # there is no room yet
    room = growth_bytes + 10_000
    run_until(model, lambda: model.forward._pressure.limit_bytes is None)


@pytest.mark.slow
def test_an_error_elsewhere_that_the_device_has_counted_makes_the_next_step_tighter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_errors = 0
    monkeypatch.setattr(tighter_plans, "n_out_of_memory", lambda _device: n_errors)
    model = fitted(model_of())
    step(model, Case())
    n_errors = 1
    step(model, Case())
    assert len(plans_of(model)) == 2
    assert "out of memory outside of the model's passes" in caplog.text


def descend(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad)


@pytest.mark.slow
def test_an_optimizer_inside_of_the_backward_pass_ends_the_step() -> None:
    """Parameters have changed when memory runs short: nothing is run again on others."""
    model = fitted(model_of(WithLoss))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(descend)
    counted = FailingOperators()
    step(model, Case(kind=WithLoss), counted)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(model, Case(kind=WithLoss), FailingOperators([len(counted.names) - 5]))
    assert "parameters or the batch have changed" in caught.value.__notes__[0]


@pytest.mark.slow
def test_two_forward_passes_before_both_backward_passes() -> None:
    plain = model_of(WithLoss)
    model = fitted(model_of(WithLoss))
    from_start(model, copy.deepcopy(plain.state_dict()))
    x, scale = torch.randn(2, N_ROWS, 16), torch.rand(16)
    for each in (plain, model):
        torch.manual_seed(2)
        losses = [each(part, scale) for part in x]
        for loss in losses[::-1]:
            with FailingOperators([5]) if each is model else nullcontext():
                loss.backward()
    assert_equal([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert_equal([*plain.buffers()], [*model.buffers()])
    assert len(plans_of(model)) > 1


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux",
    reason="RLIMIT_AS makes PyTorch's allocator fail on Linux; macOS does not enforce it",
)
def test_a_process_whose_memory_is_limited_trains_on() -> None:
    """PyTorch's own allocator is out of memory, in the forward and in the backward pass."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.limited_process"],
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.splitlines() == ["True True"] * 2, done.stderr
    assert "out of memory in the" in done.stderr


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
