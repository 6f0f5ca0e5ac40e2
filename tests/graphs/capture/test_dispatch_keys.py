"""A trace that fails leaves the thread's dispatch keys as they were."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from graphs.model_calls import TraceError
from scheduler_runtime import fit
from solver import solve


class Linearized(nn.Module):
    """Calls a transform that cannot be traced, and that fails while autograd is off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, slope = torch.func.linearize(lambda each: self.layer(each).tanh(), x)
        loss: torch.Tensor = slope(torch.ones_like(x)).square().mean() + y.mean()
        return loss


def dispatch_keys() -> tuple[str, str]:
    included = torch._C._dispatch_tls_local_include_set()
    return str(included), str(torch._C._dispatch_tls_local_exclude_set())


def test_solve_that_fails_changes_no_dispatch_keys() -> None:
    before, x = dispatch_keys(), torch.randn(6, 4)
    with pytest.raises(TraceError, match="cannot be traced"):
        solve(Linearized(), x, budget="1GB")
    gc.collect()  # guards that the error has held set the keys once more when they are freed
    assert dispatch_keys() == before
    Linearized()(x).backward()


def test_other_models_train_after_a_step_of_fit_that_fails() -> None:
    before, x = dispatch_keys(), torch.randn(6, 4)
    model = fit(Linearized(), budget="1GB")
    with pytest.raises((TraceError, RuntimeError)):
        model(x)
    gc.collect()
    assert dispatch_keys() == before
    other = nn.Linear(4, 1)
    other(x).sum().backward()
    assert other.weight.grad is not None
