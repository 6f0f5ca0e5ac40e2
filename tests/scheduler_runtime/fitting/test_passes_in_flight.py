"""Several forward passes before one backward pass, under `fit`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import fit

BATCHES = torch.randn(2, 32, 8)


def views(model: nn.Module) -> None:
    """As in contrastive learning."""
    a, b = (F.normalize(model(batch), dim=1) for batch in BATCHES)
    F.cross_entropy(a @ b.T, torch.arange(32)).backward()


def one_by_one(model: nn.Module) -> None:
    kept = []
    for batch in BATCHES:
        kept.append(model(batch))  # held beyond its backward pass
        kept[-1].square().sum().backward()
    model(BATCHES[0])  # never run backward, and not held


def gradients(model: nn.Module, step: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    model.zero_grad()
    step(model)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("step", "n_told"), [(views, 1), (one_by_one, 0)])
def test_passes_that_wait_together_are_told_once(
    step: Callable[[nn.Module], None], n_told: int
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    fitted = fit(copy.deepcopy(plain), budget="1MB", optimizer=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            expected = gradients(plain, step)
            assert all(map(torch.equal, expected, gradients(fitted, step)))
    told = [str(each.message) for each in caught if "wait for a backward pass" in str(each.message)]
    assert len(told) == n_told
    assert all("2 forward passes of Sequential" in each for each in told)
