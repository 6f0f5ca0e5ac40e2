"""`solve(..., passes=N)` and `apply`: N forward passes wait for one backward pass."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs import PassesError
from scheduler_runtime import apply, remove
from solver import solve
from solver.schedule import Solution
from tests.support.bitwise import assert_equal
from tests.support.passes import WithLoss, blocks, step_peak_bytes, sum_of_losses, trained

WITHIN = 0.01


def planned(model: WithLoss, x: torch.Tensor, *, share: float, n: int) -> Solution:
    """For a share of the way from what is resident to the peak without a plan; 0: the least."""
    optimizer = torch.optim.AdamW(model.parameters())

    def of(budget_bytes: int) -> Solution:
        return solve(model, x, budget=budget_bytes, optimizer=optimizer, passes=n)

    plain = of(10**9)
    resident_bytes = plain.graph.resident_bytes
    budget_bytes = resident_bytes + int(share * (plain.baseline.peak_bytes - resident_bytes))
    found = of(budget_bytes)
    if share:
        return found
    assert found.minimum_budget_bytes is not None
    return of(found.minimum_budget_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "n_rows", "share"),
    [
        (2, 256, 0.4),
        (2, 8, 1.0),  # gradients take more than what is saved
        (3, 256, 0.7),
        (2, 256, 0.0),
        (2, 8, 0.0),
        (2, 64, 0.8),
        (3, 256, 0.0),
        (3, 8, 1.0),
    ],
)
def test_the_budget_holds_for_the_whole_step(n: int, n_rows: int, share: float) -> None:
    torch.manual_seed(0)
    model = WithLoss(blocks())
    batches = list(torch.randn(n, n_rows, 32))
    solution = planned(model, batches[0], share=share, n=n)
    assert solution.graph.n_in_flight == n
    expected, plain = trained(copy.deepcopy(model), sum_of_losses, batches)
    assert plain[-1] == pytest.approx(solution.baseline.peak_bytes, rel=WITHIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, peaks = trained(apply(model, solution), sum_of_losses, batches)
    assert_equal(expected, got)
    predicted_bytes = solution.simulation.peak_bytes
    assert predicted_bytes <= solution.request.available_bytes
    assert peaks[-1] == pytest.approx(predicted_bytes, rel=WITHIN)
    assert max(peaks) <= predicted_bytes + 64  # scalars: losses and their sum


@pytest.mark.slow
def test_gradients_add_up_beside_a_loss_outside_of_the_model() -> None:
    torch.manual_seed(0)
    model, batches = blocks(), list(torch.randn(2, 8, 32))

    def mean_square(output: torch.Tensor, _batch: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    def step(called: nn.Module, batches: Sequence[torch.Tensor]) -> None:
        torch.stack([mean_square(called(x), x) for x in batches]).sum().backward()

    solution = solve(model, batches[0], budget="1GB", passes=2, loss=mean_square)
    measured = step_peak_bytes(apply(model, solution), step, batches, None)
    assert measured == pytest.approx(solution.simulation.peak_bytes, rel=2 * WITHIN)
    assert measured <= solution.simulation.peak_bytes


def test_gradients_that_exist_stay_beside_the_sum_of_those_of_the_passes() -> None:
    torch.manual_seed(0)
    model = WithLoss(blocks())
    batches = list(torch.randn(2, 8, 32))
    solution = solve(model, batches[0], budget="1GB", passes=2, gradients="accumulate")
    apply(model, solution)
    sum_of_losses(model, batches)
    with_them = copy.copy(model)
    with_them.zero_grad = lambda: None
    measured = step_peak_bytes(with_them, sum_of_losses, batches, None)
    assert measured == pytest.approx(solution.simulation.peak_bytes, rel=WITHIN)


@pytest.mark.slow
def test_smaller_batches_in_the_same_step_have_room_beside_the_planned_ones() -> None:
    torch.manual_seed(0)
    model = WithLoss(blocks())
    x = torch.randn(256, 32)
    solution = planned(model, x, share=0.5, n=2)
    for batches in ([x, x[:100]], [x[:100], x], [x[:100], x[:60]]):
        expected, _ = trained(copy.deepcopy(model), sum_of_losses, batches)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got, peaks = trained(apply(copy.deepcopy(model), solution), sum_of_losses, batches)
        assert_equal(expected, got)
        assert max(peaks) <= solution.request.available_bytes


@pytest.mark.slow
def test_more_passes_than_planned_are_told_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithLoss(blocks())
    batches = list(torch.randn(3, 256, 32))
    solution = planned(model, batches[0], share=0.5, n=2)
    solution.save(tmp_path / "plan.json")
    for plan in (solution, tmp_path / "plan.json"):
        apply(model, plan)
        with pytest.warns(UserWarning, match="plan is for 2: this step may take up to") as told:
            trained(model, sum_of_losses, batches, n_steps=2)
        assert [str(each.message) for each in told if "passes=3" in str(each.message)]
        assert len(told) == 1
        remove(model)
    apply(model, solution)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            kept = [model(x) for x in batches]  # not in flight
        trained(model, sum_of_losses, batches[:2])
    assert len(kept) == 3


@pytest.mark.slow
def test_plans_of_other_numbers_of_passes_do_not_go_together() -> None:
    model, x = WithLoss(blocks()), torch.randn(8, 32)
    plans = [solve(model, x, budget="1GB", passes=n) for n in (2, 3)]
    with pytest.raises(ValueError, match="plans are for different steps: passes is"):
        apply(model, plans)


def test_what_is_no_number_of_passes_is_refused() -> None:
    model, x = WithLoss(blocks()), torch.randn(8, 32)
    with pytest.raises(PassesError, match="passes is 0; give a whole number of at least 1"):
        solve(model, x, budget="1GB", passes=0)
    with pytest.raises(PassesError, match="not planned for FSDP2"):
        solve(model, x, budget="1GB", passes=2, fsdp=2)
    with pytest.raises(ValueError, match="2 micro-batches or passes in flight"):
        solve(model, x, budget="1GB", passes=2, host_budget="1GB", host_link="1GB/s")
