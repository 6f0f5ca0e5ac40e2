"""Parameters whose gradients have a dtype of their own (`grad_dtype`), as autograd casts each part
of a gradient before it adds them: refused where a trace adds first, planned where steps are run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphs.capture.refuse import refuse_gradient_dtypes
from graphs.model_calls import gradient_bytes
from graphs.trace import TraceError, trace
from scheduler_runtime import apply, fit
from scheduler_runtime.by_submodule.planning import plan_chain
from scheduler_runtime.compiler import compile_model
from solver.sizes_deadlines_progress import BudgetError
from solver.solving import solve
from tests.support.bitwise import assert_equal, one_step

BATCH = torch.linspace(-1, 1, 32 * 16).view(32, 16).bfloat16()


class Twice(nn.Module):
    """Layers that run twice, so that each gradient is a sum."""

    def __init__(self, grad_dtype: torch.dtype | None = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).bfloat16()
        for parameter in self.parameters():
            parameter.grad_dtype = grad_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x).tanh()
        return x.float().square().mean()


class Once(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


PLANNED: dict[str, Callable[[nn.Module], object]] = {
    "trace": lambda model: trace(model, BATCH),
    "FSDP2": lambda model: trace(model, BATCH, fsdp=2),
    "fit": lambda model: fit(model, budget="1GB")(BATCH),
}


@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
@pytest.mark.parametrize("how", PLANNED)
def test_a_dtype_of_the_gradients_own_is_refused(how: str, grad_dtype: torch.dtype | None) -> None:
    model = Twice(grad_dtype)
    words = rf"parameter 'layers\.0\.weight' is torch\.bfloat16 and has grad_dtype={grad_dtype}: "
    with pytest.raises(TraceError, match=words) as raised:
        PLANNED[how](model)
    assert "set grad_dtype=torch.bfloat16" in str(raised.value)
    assert "plan_chain" in str(raised.value)


@pytest.mark.parametrize("is_run", [False, True], ids=["never run", "run before"])
def test_it_is_refused_when_it_is_set_after_planning(is_run: bool) -> None:
    model = Twice()
    apply(model, solve(model, BATCH, budget="1GB"))
    if is_run:
        model(BATCH).backward()
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    with pytest.raises(TraceError, match=r"grad_dtype=torch\.float32"):
        model(BATCH)


def test_inputs_are_checked_and_frozen_parameters_are_not() -> None:
    model = Twice(torch.float32).requires_grad_(False)
    refuse_gradient_dtypes(model, [BATCH])
    given = torch.zeros(3, requires_grad=True)
    refuse_gradient_dtypes(model, [BATCH, given, 2 * given])
    given.grad_dtype = torch.float64
    with pytest.raises(TraceError, match=r"tensor 1 of the batch is torch\.float32 and has"):
        refuse_gradient_dtypes(model, [BATCH, given])


@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
def test_measured_steps_keep_it(grad_dtype: torch.dtype | None) -> None:
    plain, model = Once(grad_dtype), Once(grad_dtype)
    solution = plan_chain(model, BATCH, budget="1GB")
    gradients = [t.size_bytes for t in solution.graph.tensors if t.kind == "gradient"]
    assert sum(gradients) == sum(map(gradient_bytes, model.parameters()))
    element_bytes = 4 if grad_dtype is torch.float32 else 2
    assert sum(gradients) == element_bytes * sum(p.numel() for p in model.parameters())
    apply(model, solution)
    assert_equal(one_step(plain, BATCH, 0), one_step(model, BATCH, 0))


def test_compile_counts_gradients_in_their_own_dtype() -> None:
    model = Once(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    n_elements = sum(p.numel() for p in model.parameters())
    resident_bytes = 2 * n_elements + BATCH.nbytes
    with pytest.raises(BudgetError, match=f"takes {resident_bytes + 4 * n_elements} bytes"):
        compile_model.compile(
            model,
            BATCH,
            budget=resident_bytes + 4 * n_elements - 1,
            optimizer=optimizer,
            backend="aot_eager",
        )
