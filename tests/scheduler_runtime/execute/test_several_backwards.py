"""Several backward passes through one forward pass of a planned module (`retain_graph=True`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scheduler_runtime import apply, fit
from scheduler_runtime.execute.spill_file import DiskError
from scheduler_runtime.measuring import absolute_peak_bytes, no_garbage, resident_tensors
from solver import solve
from solver.schedule import Solution
from tests.support.bitwise import assert_equal
from tests.support.failing_disk import failing_disk
from tests.support.full_device import FailingOperators
from tests.support.opaque_models import Branching

CPU = torch.device("cpu")


class Normalised(nn.Module):
    """Draws random numbers, and writes the statistics of batch norms."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(32, 32), nn.GELU(), nn.BatchNorm1d(32), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


class WithLoss(Normalised):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class MovingAverage(Normalised):
    """Its results depend on a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) - self.center
        with torch.no_grad():
            self.center.lerp_(x.mean(0), 0.1)
        return out


class TwoHeads(Normalised):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layers(x)
        return self.last(hidden), hidden.sin()


class Branches(Normalised):
    """A part of it is planned as one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Branching(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.part(x))


class Noisy(Normalised):
    """A part of it draws from a generator that nothing holds, so it must not run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.part = OwnNoise()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.part(x))


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = np.random.default_rng().normal(size=x.shape)
        return self.scale(x) * torch.as_tensor(noise, dtype=x.dtype)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, target = torch.randn(2, 128, 32, generator=generator)
    return x, target


def weighted(model: nn.Module) -> list[torch.Tensor]:
    """A step that weighs two losses by their gradients at the last layer, as VQGAN does: four
    backward passes, of which the first two end at that layer."""
    torch.manual_seed(3)
    x, target = batch()
    out = model(x)
    losses = F.mse_loss(out, target), out.abs().mean()
    last = model.last.weight
    norms = [torch.autograd.grad(each, last, retain_graph=True)[0].norm() for each in losses]
    losses[0].backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    torch.rand(3)  # the generator goes on from here
    (losses[1] * (norms[0] / norms[1])).backward()
    return [*norms, *first, *state(model)]


def of_two_heads(model: nn.Module) -> list[torch.Tensor]:
    """A step with the gradients of two tasks, one after the other, as PCGrad takes them."""
    torch.manual_seed(3)
    x, target = batch()
    found = []
    one, two = model(x)
    for loss in (F.mse_loss(one, target), F.l1_loss(two, target)):
        loss.backward(retain_graph=True)
        found += [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return [*found, *model.buffers(), torch.get_rng_state()]


def state(model: nn.Module) -> list[torch.Tensor]:
    return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


def planned(model: nn.Module, share: float, **options: Any) -> tuple[nn.Module, Solution]:
    """The model, with a plan for this share of what the peak adds to the resident bytes."""
    x, target = batch()
    loss = None if isinstance(model, WithLoss) else lambda out, _: F.mse_loss(out, target)
    free = solve(model, x, loss=loss, budget="1GB", reserve=0)
    added_bytes = free.baseline.peak_bytes - free.graph.resident_bytes
    budget_bytes = free.graph.resident_bytes + int(share * added_bytes)
    solution = solve(
        model, x, loss=loss, budget=budget_bytes, reserve=0, time_limit_s=600, **options
    )
    return apply(model, solution), solution


@pytest.mark.parametrize("share", [1.0, pytest.param(0.6, marks=pytest.mark.slow)])
def test_each_backward_pass_has_the_bits_of_the_plain_step(share: float) -> None:
    torch.manual_seed(0)
    plain = Normalised()
    model, solution = planned(copy.deepcopy(plain), share)
    assert (solution.simulation.n_recomputed > 0) == (share < 1)
    for _ in range(2):
        assert_equal(weighted(plain), weighted(model))
        for each in (plain, model):
            each.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
def test_copies_are_made_again(on_disk: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Normalised()
    places: dict[str, Any] = {"host_budget": "1MB", "host_link": 1e14}
    if on_disk:
        places |= {"host_budget": "40KB", "disk_budget": f"1MB:{tmp_path}", "disk_rate": 1e14}
    model, solution = planned(copy.deepcopy(plain), 0.7, **places)
    assert solution.simulation.host_peak_bytes > 0
    assert (solution.simulation.disk_peak_bytes > 0) == on_disk
    assert_equal(weighted(plain), weighted(model))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [1.0, pytest.param(0.6, marks=pytest.mark.slow)])
def test_no_backward_pass_takes_more_than_the_plan(share: float) -> None:
    torch.manual_seed(0)
    x, _ = batch()
    model, solution = planned(WithLoss(), share)
    parameters = [*model.parameters()]

    def step() -> None:
        loss = model(x)
        for keeps in (True, True, False):
            torch.autograd.grad(loss, parameters, retain_graph=keeps)

    with no_garbage(CPU):
        peak_bytes = absolute_peak_bytes(step, CPU, resident_tensors(model, [x], ()))
    # forward writes the buffers again, so their values are kept meanwhile
    kept_bytes = sum(b.nbytes for b in model.buffers())
    assert peak_bytes <= solution.simulation.peak_bytes + kept_bytes


def test_the_graph_must_be_kept() -> None:
    model, _ = planned(WithLoss(), 1.0)
    loss = model(batch()[0])
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"a second time .* or give retain_graph=True to all"):
        loss.backward()


@pytest.mark.parametrize("changed", ["parameter", "batch"])
def test_what_forward_reads_must_not_have_changed(changed: str) -> None:
    model, _ = planned(WithLoss(), 1.0)
    x, _ = batch()
    loss = model(x)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        (x if changed == "batch" else model.last.weight).mul_(2)
    words = "tensor 0 of the batch" if changed == "batch" else "parameter 'last.weight'"
    with pytest.raises(RuntimeError, match=f"{words} was changed in place before another"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [(MovingAverage, "may read buffer 'center', which"), (Branches, "planned as one piece")],
)
def test_what_cannot_run_again_is_refused_and_with_fit_it_can(
    make: Callable[[], nn.Module], words: str
) -> None:
    torch.manual_seed(0)
    plain = make()
    model, _ = planned(copy.deepcopy(plain), 1.0)
    with pytest.raises(RuntimeError, match=f"cannot run again: .*{words}"):
        weighted(model)
    model = fit(copy.deepcopy(plain), budget="1GB")
    for _ in range(2):
        assert_equal(weighted(plain), weighted(model))
        for each in (plain, model):
            each.zero_grad()


@pytest.mark.slow
def test_a_part_that_must_not_run_twice_is_refused_by_fit_too() -> None:
    model = fit(Noisy(), budget="1GB")
    with pytest.raises(RuntimeError, match=r"cannot run again: .* draws other numbers each time"):
        weighted(model)


def test_other_forward_passes_in_between() -> None:
    torch.manual_seed(0)
    plain = WithLoss()
    model, _ = planned(copy.deepcopy(plain), 1.0)
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        one, two = (each(x) for x in batch())
        one.backward(retain_graph=True)
        two.backward(retain_graph=True)
        each(batch()[1])
        (2 * one).backward()
        two.backward()
        found.append(state(each))
    assert_equal(*found)


@pytest.mark.slow
def test_a_disk_that_fails_in_another_pass_says_which_gradients_are_left(tmp_path: Path) -> None:
    places = {"host_budget": "40KB", "host_link": 1e14, "disk_budget": f"1MB:{tmp_path}"}
    model, _ = planned(Normalised(), 0.7, **places, disk_rate=1e14)
    x, target = batch()
    loss = F.mse_loss(model(x), target)
    loss.backward(retain_graph=True)
    with (
        failing_disk("pwrite", 0),
        pytest.raises(DiskError, match="have been added to earlier ones in part"),
    ):
        loss.backward()


@pytest.mark.slow
def test_fit_plans_each_task_s_gradients() -> None:
    torch.manual_seed(0)
    plain = TwoHeads()
    model = fit(copy.deepcopy(plain), budget="1GB")
    for _ in range(3):
        assert_equal(of_two_heads(plain), of_two_heads(model))


@pytest.mark.slow
def test_memory_may_run_out_when_forward_runs_again() -> None:
    """Also after it has run out in the first backward pass."""
    torch.manual_seed(0)
    plain = Normalised()
    models = [copy.deepcopy(plain) for _ in range(6)]
    x, target = batch()
    torch.manual_seed(3)
    out = plain(x)
    F.mse_loss(out, target).backward(retain_graph=True)
    out.abs().mean().backward()
    want, where = state(plain), set()
    for index, model in enumerate(models):
        at = 16 + 4 * index
        fit(model, budget="1GB", on_pressure="replan")
        torch.manual_seed(3)
        out = model(x)
        first, second = F.mse_loss(out, target), out.abs().mean()
        with FailingOperators({8} if index % 2 else {}) as operators:
            first.backward(retain_graph=True)
        assert operators.n_raised == index % 2
        with FailingOperators({at}) as operators:
            second.backward()
        assert operators.n_raised == 1
        where.add(operators.names[at])
        assert_equal(want, state(model))
    assert "aten.gelu.default" in where  # in the forward pass that runs again
