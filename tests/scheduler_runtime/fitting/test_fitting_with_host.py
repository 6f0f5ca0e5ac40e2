"""`fit` with host memory: plans with copies for each kind of call, in one block of host memory."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import fit, measure, plans_of
from scheduler_runtime.execute import copies as copies_module
from solver import solve
from solver.schedule import Link
from solver.sizes_deadlines_progress import BudgetError
from tests.support.bitwise import assert_equal, assert_same_gradients
from tests.support.pools import made_pools

__all__ = ["made_pools"]

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
HOST: dict[str, Any] = {"host_budget": "1GB", "host_link": "1TB/s"}


class Tower(nn.Module):
    """Blocks with dropout and batch norm; the caller computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(3))
        self.norm = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, norm, down in zip(self.up, self.norm, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(norm(up(x)))), 0.2)
        return self.head(x)


def numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 10


def loss_of(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output.float(), batch[1])


OUTSIDE: dict[str, Any] = {"inputs": lambda batch: batch[0], "loss": loss_of}


def tower() -> nn.Module:
    torch.manual_seed(0)
    return Tower()


def budget_for(model: nn.Module, batch: Any, share: float) -> int:
    """Bytes: that share of the way from what is resident to the peak without a plan."""
    solution = solve(model, batch, budget="1TB", optimizer=adamw(model.parameters()), **OUTSIDE)
    resident_bytes = solution.graph.resident_bytes
    return int(resident_bytes + share * (solution.baseline.peak_bytes - resident_bytes))


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Any],
    *,
    n_micro: int = 1,
    autocast: bool = False,
) -> list[torch.Tensor]:
    """Losses, gradients of the last step, parameters, buffers and the random state."""
    torch.manual_seed(1)
    results = []
    for step, batch in enumerate(batches):
        if step % n_micro == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(batch[0])
        loss = loss_of(output, batch)
        (loss / n_micro).backward()
        if (step + 1) % n_micro == 0:
            optimizer.step()
        results.append(loss.detach().clone())
    results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*results, *model.parameters(), *model.buffers(), torch.get_rng_state()]


def both(
    batches: list[Any], *, share: float = 0.5, **options: Any
) -> tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """The fitted module, and what training gives without and with the plans."""
    plain, fitted = tower(), tower()
    optimizer = adamw(fitted.parameters())
    fit(fitted, budget=budget_for(plain, batches[0], share), optimizer=optimizer, **HOST)
    expected = trained(plain, adamw(plain.parameters()), batches, **options)
    return fitted, expected, trained(fitted, optimizer, batches, **options)


def assert_copied(model: nn.Module) -> None:
    for plan in plans_of(model):
        solution = plan.solution
        assert solution.schedule.has_copies
        assert solution.simulation.peak_bytes <= solution.request.available_bytes
        assert solution.request.places.host.link == Link(1e12, 1e12)


@pytest.mark.slow
def test_each_shape_is_planned_and_all_share_one_block(
    made_pools: list[copies_module.Pool],
) -> None:
    sizes = (192, 256, 224, 256, 192)
    plain, fitted = tower(), tower()
    optimizer = adamw(fitted.parameters())
    budget = budget_for(plain, numbers(256), 0.7)
    fit(fitted, budget=budget, optimizer=optimizer, **HOST)
    batches = [numbers(n) for n in sizes]
    expected = trained(plain, adamw(plain.parameters()), batches)
    got = trained(fitted, optimizer, batches)
    assert_equal(expected, got)
    assert_copied(fitted)
    assert len(plans_of(fitted)) == 3
    blocks = [pool.host.numel() for pool in made_pools]
    assert len(blocks) in (1, 2)  # a larger takes the place of a smaller
    assert blocks == sorted(blocks)
    assert len(fitted.forward._pools._free) == 1


@pytest.mark.slow
def test_a_copy_of_the_module_has_a_block_of_its_own(
    made_pools: list[copies_module.Pool],
) -> None:
    fitted, _, _ = both([numbers(256)])
    twin = copy.deepcopy(fitted)
    with pytest.warns(UserWarning, match="optimizer"):
        twin(numbers(256)[0]).sum().backward()
    assert len(made_pools) == 2


@pytest.mark.slow
def test_accumulated_gradients() -> None:
    fitted, expected, got = both([numbers(256)] * 6, n_micro=3, share=0.7)
    assert_equal(expected, got)
    assert_copied(fitted)
    assert len(plans_of(fitted)) == 2


@pytest.mark.slow
def test_autocast() -> None:
    fitted, expected, got = both([numbers(256)] * 2, autocast=True, share=0.4)
    assert_equal(expected, got)
    assert_copied(fitted)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_the_measured_peak_is_within_the_prediction(share: float) -> None:
    model, batch = tower(), numbers(256)
    optimizer = adamw(model.parameters())
    budget = budget_for(model, batch, share)
    fit(model, budget=budget, optimizer=optimizer, **HOST)
    trained(model, optimizer, [batch])
    gc.collect()
    measured_bytes = measure(model, batch, optimizer=optimizer, **OUTSIDE).peak_bytes
    assert_copied(model)
    assert measured_bytes <= min(p.solution.simulation.peak_bytes for p in plans_of(model))


def test_after_the_training_has_replaced_the_optimizer_plans_have_no_state_on_the_host() -> None:
    model = tower()
    optimizer = adamw(model.parameters())
    fit(model, budget="1GB", optimizer=optimizer, optimizer_state="host", **HOST)
    trained(model, optimizer, [numbers(8)] * 2)
    assert plans_of(model)[0].solution.graph.host_state_bytes
    optimizer = adamw(model.parameters())
    gc.collect()
    with pytest.warns(UserWarning, match=r"optimizer that fit was given for .* is gone"):
        trained(model, optimizer, [numbers(8), numbers(16)])
    assert not plans_of(model)[-1].solution.graph.host_state_bytes


@pytest.mark.slow
def test_gradients_of_other_outputs_than_planned() -> None:
    """The step runs again, with another plan; the first one's block is free by then."""

    class Two(Tower):
        def forward(self, x: torch.Tensor) -> Any:
            for up, norm, down in zip(self.up, self.norm, self.down, strict=True):
                x = x + down(F.gelu(norm(up(x))))
            return self.head(x), x

    torch.manual_seed(0)
    plain = Two()
    fitted = copy.deepcopy(plain)
    batch, _ = numbers(256)
    alone = solve(plain, batch, budget="1TB", loss=lambda output, _: output[0].sum())
    fit(fitted, budget=int(1.5 * alone.baseline.peak_bytes), optimizer=[], **HOST)
    for model in (plain, fitted):
        for _ in range(2):
            model(batch)[0].square().sum().backward()
    assert_same_gradients(plain, fitted)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_link": "50GB/s"}, BudgetError, "a link to the host is given .* no host memory"),
        ({"host_budget": "much"}, BudgetError, "invalid host budget 'much'"),
        ({"host_budget": "1GB", "host_link": "50Gb/s"}, BudgetError, "'50Gb/s': a lower-case b"),
        ({"host_budget": "1GB", "method": "sqrt"}, ValueError, "sqrt copies nothing to the host"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(tower(), budget="1GB", **options)
