"""Verification of plans that change last bits: errors against float64."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from graphs.rewrites import chunk_sizes, head_loop
from graphs.trace import trace
from scheduler_runtime.verifying import run_both_steps
from scheduler_runtime.verifying.rounding_errors import InFloat64, errors
from solver import solve
from solver.reporting import Report
from solver.reporting.terminal import show
from solver.schedule import Solution
from tests.support.budgets import baseline_peak_bytes
from tests.support.wide_logits import IGNORED, rows


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sizes, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(chunk_sizes, "LEAST_ROWS", 64)


class Language(nn.Module):
    """Dropout, a head, and a loss that casts to float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 2048)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(*rows(self.head(self.dropout(x)).float(), y))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.randint(0, 2048, (4, 128))
    y[0, :9] = IGNORED
    return torch.randn(4, 128, 8), y


def planned() -> Solution:
    graph = trace(Language(), batch(), rewrites=("head_and_loss_in_4_chunks", "in_place"))
    return solve(graph, budget=baseline_peak_bytes(graph))


def verified(solution: Solution, model: Any = Language) -> Any:
    return run_both_steps(
        solution,
        model=model,
        batch=batch,
        loss=None,
        inputs=None,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        device="cpu",
        autocast=None,
    )


@pytest.mark.slow
def test_errors_are_compared_where_last_bits_may_change() -> None:
    solution = planned()
    found = verified(solution)
    assert found.results == "allclose"
    assert not found.differences
    assert " with the plan, " in found.largest_error
    plain = verified(solve(trace(Language(), batch()), budget="1GB"))
    assert (plain.results, plain.largest_error, plain.differences) == ("bitwise", "", ())
    report = Report(problem="", device="", costs="", solutions=(solution,), verification=found)
    out = io.StringIO()
    show(report, Console(file=out, width=80))
    text = " ".join(out.getvalue().split())
    assert "errors of loss and 2 gradients against float64 are at most twice" in text
    assert "last bits of the results differ" in text


@pytest.mark.slow
def test_an_error_that_is_too_large_is_found(monkeypatch) -> None:
    """A sum of products that are a hundredth too small."""
    solution = planned()
    add_product = head_loop._Sum.add_product
    monkeypatch.setattr(head_loop._Sum, "add_product", lambda s, a, b: add_product(s, 0.99 * a, b))
    (difference,) = verified(solution).differences
    assert difference.startswith("error of gradient of head.weight: ")


@pytest.mark.slow
def test_what_float64_cannot_say_is_told() -> None:
    """A step that computes something else in float64, or does not run in it."""

    class Other(Language):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:
                x = x.flip(-1)
            return super().forward(x, y)

    class Unable(Language):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:
                raise RuntimeError("no kernel for float64")
            return super().forward(x, y)

    solution = planned()
    for model, reason in ((Other, "computes something else"), (Unable, "no kernel for float64")):
        found = verified(solution, model)
        assert not found.passed
        assert any(reason in words for words in found.differences)


def test_casts_of_float64_to_float32_do_nothing_in_the_reference() -> None:
    x = torch.full((2,), 1 / 3, dtype=torch.float64, requires_grad=True)
    with InFloat64():
        made = x.float() * 3
        made.sum().backward()
    assert made.dtype == x.grad.dtype == torch.float64
    assert torch.equal(made, 3 * x)


def test_an_error_is_infinite_where_only_one_is_a_number() -> None:
    exact = {"x": torch.tensor([1.0, float("nan")], dtype=torch.float64)}
    both, none = {"x": torch.tensor([1.0, float("nan")])}, {"x": torch.ones(2)}
    (error,) = errors(both, none, exact)
    assert (error.plan, error.plain) == (0.0, float("inf"))
    assert dataclasses.replace(error, plan=1e-3, plain=1e-9, least=6e-8).share > 1
