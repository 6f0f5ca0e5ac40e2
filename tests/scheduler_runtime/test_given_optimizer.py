"""An optimizer is given in one of the same forms wherever one is taken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphs.trace import trace
from scheduler_runtime import fit, measure, plans_of, verify
from scheduler_runtime.compiler import compile as compile_within
from scheduler_runtime.compiler import compile_reports
from solver import solve

SGD = torch.optim.SGD
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "class": lambda _model: SGD,
    "function of the parameters": lambda _model: lambda parameters: SGD(parameters, lr=1e-3),
    "function of the model": lambda _model: lambda model: SGD(model.parameters(), lr=1e-3),
    "name": lambda _model: "SGD",
    "optimizer": lambda model: SGD(model.parameters(), lr=1e-3),
    "wrapper": lambda model: SimpleNamespace(optimizer=SGD(model.parameters(), lr=1e-3)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean()


def batch() -> torch.Tensor:
    return torch.ones(4, 8)


def name_in(graph: Any) -> str:
    return str(graph.meta.environment["optimizer"]["name"])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_solve_verify_and_measure(form: str) -> None:
    model = Net()
    solution = solve(model, batch(), budget="1GB", optimizer=FORMS[form](model))
    assert name_in(solution.graph) == "SGD"
    checked = Net()
    optimizer = FORMS[form](checked)
    assert verify(solution, model=lambda: checked, batch=batch, optimizer=optimizer).passed
    assert measure(model, batch(), optimizer=FORMS[form](model), n_steps=1).peak_bytes > 0


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("form", FORMS)
def test_fit(form: str) -> None:
    model = Net()
    fit(model, budget="1GB", optimizer=FORMS[form](model))
    model(batch()).backward()
    (plan,) = plans_of(model)
    assert name_in(plan.solution.graph) == "SGD"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_compile(form: str) -> None:
    model = Net()
    given = FORMS[form](model)
    compile_within(model, batch(), budget="1GB", optimizer=given, backend="aot_eager")
    assert compile_reports(model)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ("Adamw", ValueError, "optimizer is 'Adamw', which is not a class of torch.optim"),
        ("lr_scheduler", ValueError, "not a class of torch.optim"),
        (3, TypeError, "optimizer is an object of type int; give the torch.optim.Optimizer"),
        (lambda _parameters: 3, TypeError, r"what optimizer\(parameters\) returned is an object"),
        (lambda: SGD, TypeError, "takes 0 positional arguments"),
        (
            lambda model: SGD(model.params(), 0.1),
            TypeError,
            r"with one argument, the list of trainable parameters or the model, and returns the",
        ),
    ],
)
def test_what_is_no_optimizer(given: Any, error: type[Exception], why: str) -> None:
    solution = solve(Net(), batch(), budget="1GB")
    calls: list[Callable[[], Any]] = [
        lambda: trace(Net(), batch(), optimizer=given),
        lambda: fit(Net(), budget="1GB", optimizer=given),
        lambda: measure(Net(), batch(), optimizer=given),
        lambda: verify(solution, model=Net, batch=batch, optimizer=given),
    ]
    for call in calls:
        with pytest.raises(error, match=why):
            call()


def test_verify_leaves_the_state_of_an_optimizer_alone() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    solution = solve(model, batch(), budget="1GB", optimizer=optimizer)
    assert verify(solution, model=lambda: model, batch=batch, optimizer=optimizer).passed
    assert not optimizer.state
    with pytest.raises(ValueError, match="has none of this Net's parameters"):
        verify(solution, model=Net, batch=batch, optimizer=optimizer)
