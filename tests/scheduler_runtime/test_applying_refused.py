"""What `apply`, and a step with a plan, refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scheduler_runtime import apply
from solver.schedule.ops import free_after_last_use
from solver.schedule.recompute import keep_order
from solver.schedule.simulator import IllegalScheduleError
from solver.schedule.solution import Request
from solver.solving import answer
from tests.scheduler_runtime.test_applying import planned_language_model, planned_linear
from tests.support.bitwise import (
    solution_of,
    traced,
)
from tests.support.models import TiedLanguageModel


@pytest.mark.slow
def test_a_parameter_changed_before_backward_is_refused() -> None:
    model, batch, _ = planned_language_model()
    loss = model(batch)
    with torch.no_grad():
        model.head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"parameter 'embed.weight' was changed in place"):
        loss.backward()


@pytest.mark.slow
def test_an_illegal_schedule_file_is_refused_by_the_simulator(tmp_path: Path) -> None:
    model, batch, graph = traced(TiedLanguageModel)
    path = tmp_path / "schedule.json"
    solution_of(graph, free_after_last_use(graph, keep_order(graph, set()))).save(path)
    path.write_text(path.read_text().replace('"compute",\n   "gelu"', '"compute",\n   "addmm"', 1))
    with pytest.raises(IllegalScheduleError):
        apply(model, path)(batch)


@pytest.mark.slow
def test_a_solution_without_schedule_cannot_be_applied() -> None:
    _, _, graph = traced(TiedLanguageModel)
    nothing = answer(graph, Request(budget_bytes=1000, method="none"))
    with pytest.raises(ValueError, match=r"no schedule to apply: .* infeasible, .* minimum budget"):
        apply(TiedLanguageModel(), nothing)


def test_a_weight_read_through_a_view_and_changed_is_refused() -> None:
    _, planned, x = planned_linear()
    loss = planned(x)["loss"]
    with torch.no_grad():
        planned.layers[2].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_gradient_that_nobody_planned_for_is_refused() -> None:
    _, planned, x = planned_linear()
    output = planned(x)
    with pytest.raises(RuntimeError, match="receives a gradient that the plan does not expect"):
        (output["loss"] + output["logits"].sum()).backward()


def test_differentiating_twice_is_refused() -> None:
    _, planned, x = planned_linear()
    x.requires_grad_(True)
    loss = planned(x)["loss"]
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
