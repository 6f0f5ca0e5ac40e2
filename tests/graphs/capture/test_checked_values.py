"""Checks of values that the step computes: the arguments of torch.distributions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal, StudentT, kl_divergence

from scheduler_runtime import apply, fit
from scheduler_runtime.execute.cuda_graph import CudaGraphError, check_program
from scheduler_runtime.measuring import measure
from solver import solve
from solver.schedule import Simulation
from tests.support.bitwise import assert_equal


@pytest.fixture(autouse=True)
def _arguments_are_checked() -> Iterator[None]:
    """The default; torch.compile, once used, switches it off for the process."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


class Vae(nn.Module):
    """A variational autoencoder; batch norm has buffers, `rsample` draws."""

    def __init__(self) -> None:
        super().__init__()
        self.reads_batch = False
        self.encode = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8)
        )
        self.decode = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 48))

    def forward(self, x: Tensor) -> Tensor:
        if self.reads_batch:
            Normal(x.new_zeros(()), 1.0).log_prob(x)
        mean, scale = self.encode(x).chunk(2, -1)
        latent = Independent(Normal(mean, F.softplus(scale)), 1)
        prior = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
        df, loc, width = self.decode(latent.rsample()).chunk(3, -1)
        likelihood = StudentT(2.0 + F.softplus(df), loc, F.softplus(width)).log_prob(x.nan_to_num())
        return kl_divergence(latent, prior).mean() - likelihood.sum(-1).mean()


def made() -> tuple[Vae, Tensor]:
    torch.manual_seed(0)
    return Vae(), torch.randn(32, 16)


def trained(model: nn.Module, batch: Tensor) -> list[Any]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        optimizer.step()
    return found + [b.clone() for b in model.buffers()] + [torch.get_rng_state()]


@pytest.mark.slow
def test_the_least_budget_has_the_bits_of_plain_training() -> None:
    plain, batch = made()
    applied, fitted = copy.deepcopy(plain), copy.deepcopy(plain)
    least_bytes = solve(plain, batch, budget=1).minimum_budget_bytes
    assert least_bytes is not None
    solution = solve(applied, batch, budget=least_bytes)
    assert solution.simulation.n_recomputed > 0
    apply(applied, solution)
    fit(fitted, budget="1MB", optimizer=[])
    expected = trained(plain, batch)
    assert_equal(expected, trained(applied, batch))
    assert_equal(expected, trained(fitted, batch))


class Regression(nn.Module):
    """Predicts a mean and a variance."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2))
        self.sign = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.body(x).chunk(2, -1)
        return F.gaussian_nll_loss(mean, x[:, :1], self.sign * log_variance.exp())


def test_the_variances_of_a_gaussian_loss_are_checked_in_each_step() -> None:
    torch.manual_seed(0)
    plain, batch = Regression(), torch.randn(32, 16)
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    assert_equal(trained(plain, batch), trained(fitted, batch))
    fitted.sign.fill_(-1.0)
    with pytest.raises(ValueError, match="negative"):
        fitted(batch)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
def test_the_error_of_eager_mode_comes_in_the_step_that_has_the_value(
    is_first: bool, is_known: bool
) -> None:
    """With its message; buffers and random state are those that eager mode leaves.

    is_known: it is in the batch, and known before the step.
    """
    plain, batch = made()
    plain.reads_batch = is_known
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    wrong = batch.clone()
    wrong[3, 3] = torch.nan
    said = []
    for model in (plain, fitted):
        torch.manual_seed(2)
        if not is_first:
            model(batch).backward()
            model.zero_grad()
        with pytest.raises(ValueError, match="Expected") as refused:
            model(wrong)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert_equal(*([b.nan_to_num() for b in model.buffers()] for model in (plain, fitted)))
    assert_equal(*([t.nan_to_num() for t in trained(m, batch)] for m in (plain, fitted)))


class Likelihood(nn.Module):
    """Draws no random numbers, so that only the check keeps a random state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return -Normal(self.layer(x), 1.0, validate_args=True).log_prob(x).mean()


def test_the_random_state_that_a_failed_check_needs_is_counted() -> None:
    batch = torch.randn(32, 16)
    model = Likelihood()
    solution = solve(model, batch, budget="1MB", rewrites="none")
    assert isinstance(solution.simulation, Simulation)
    apply(model, solution)
    measured_bytes = measure(model, batch, n_steps=1).peak_bytes
    assert abs(measured_bytes - solution.simulation.peak_bytes) < 100


@pytest.mark.slow
def test_such_a_step_cannot_be_recorded_as_a_cuda_graph() -> None:
    model, batch = made()
    planned: Any = apply(model, solve(model, batch, budget="1MB"))
    planned(batch)
    ((_, bound),) = planned.forward._programs.programs
    with pytest.raises(CudaGraphError, match="checks values that the step computes"):
        check_program(bound)
