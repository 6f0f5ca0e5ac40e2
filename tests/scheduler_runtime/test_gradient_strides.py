"""Gradients that autograd copies because they do not have the strides of their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scheduler_runtime import apply
from scheduler_runtime.measuring import measure
from solver import solve
from tests.support.bitwise import assert_bitwise_identical

N_OUT, N_IN = 200, 300
SCALARS_BYTES = 64


class Weights(nn.Module):
    """Two matrices, of which the first is used as `use` says."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], first: Tensor) -> None:
        super().__init__()
        self.first, self.use = nn.Parameter(first * 0.05), use
        self.second = nn.Parameter(torch.randn(N_OUT, N_IN) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return (self.use(x, self.first) @ self.second).square().sum()


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "a transposed copy": lambda x, w: x @ w.t().contiguous(),
    "a transposed copy and a sum": lambda x, w: x @ w.t().contiguous() + w.sum(),
    "a transposed view": lambda x, w: x @ w.t(),
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(N_OUT, N_IN),
    "transposed": lambda: torch.randn(N_IN, N_OUT).t(),
}


@pytest.mark.parametrize("gradients", ["fresh", "accumulate"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("use", USES)
def test_the_copy_that_autograd_makes_is_counted(use: str, layout: str, gradients: str) -> None:
    torch.manual_seed(0)
    plain = Weights(USES[use], LAYOUTS[layout]())
    planned, batch = copy.deepcopy(plain), torch.randn(8, N_IN)
    solution = solve(planned, batch, budget="1GB", gradients=gradients)
    apply(planned, solution)
    assert solution.simulation is not None
    for model, predicted_bytes in (
        (plain, solution.baseline.peak_bytes),
        (planned, solution.simulation.peak_bytes),
    ):
        measured_bytes = measure(model, batch, gradients=gradients, n_steps=1).peak_bytes
        assert measured_bytes <= predicted_bytes
        if gradients == "fresh" and use != "a transposed copy and a sum":
            assert predicted_bytes <= measured_bytes + SCALARS_BYTES
    for model in (plain, planned):
        model.zero_grad()
    assert_bitwise_identical(plain, planned, batch)
    assert planned.first.grad.stride() == plain.first.grad.stride()
