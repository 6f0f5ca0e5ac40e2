"""What `attempt` puts back before it runs again, and what it cannot run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scheduler_runtime import attempt, fit
from tests.scheduler_runtime.fitting.test_on_pressure import N_ROWS, criterion, fitted, model_of


@pytest.mark.slow
def test_what_attempt_cannot_run_again() -> None:
    model = fitted(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, scale = torch.randn(N_ROWS, 16), torch.rand(16)

    def whole_step() -> None:
        criterion(model(x, scale)).backward()
        optimizer.step()
        raise torch.OutOfMemoryError("in the optimizer")

    def adding() -> None:
        criterion(model(x, scale)).backward()
        raise torch.OutOfMemoryError("after backward")

    def nothing() -> None:
        raise torch.OutOfMemoryError("elsewhere")

    for function, why in [
        (whole_step, "changed parameters"),
        (adding, "changed gradients that existed before"),
        (nothing, "no training forward pass"),
    ]:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            attempt(model, function)
        assert why in caught.value.__notes__[0]


def test_attempt_puts_back_the_gradient_of_the_batch() -> None:
    gradients = []
    for n_errors in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)),) * 3
        )
        optimizer = torch.optim.SGD(model.parameters())
        fit(model, budget="1MB", optimizer=optimizer, on_pressure="replan")
        x = torch.randn(32, 16, requires_grad=True)
        errors = [torch.OutOfMemoryError("after the backward pass")] * n_errors

        def run(model: nn.Module = model, x: Any = x, errors: list[Exception] = errors) -> None:
            model(x).square().sum().backward()
            if errors:
                raise errors.pop()

        attempt(model, run)
        gradients.append(x.grad)
    assert torch.equal(*gradients)
