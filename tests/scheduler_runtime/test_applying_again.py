"""A planned module meets another call: plans for it, or says what differs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.trace import trace
from scheduler_runtime import PlanMismatchError, ReplanError, apply, fit
from scheduler_runtime.fitting import plans_of
from scheduler_runtime.measuring import measure
from solver.schedule.recompute import baseline
from solver.schedule.solution import Solution
from solver.solving import solve
from tests.scheduler_runtime.test_applying import planned_language_model, planned_linear
from tests.support.bitwise import (
    assert_bitwise_identical,
    assert_equal,
    one_step,
    solution_of,
    traced,
)
from tests.support.budgets import baseline_peak_bytes
from tests.support.models import Classifier, TiedLanguageModel


@pytest.mark.slow
def test_another_shape_is_refused_by_name() -> None:
    model, batch, _ = planned_language_model()
    with pytest.raises(PlanMismatchError, match=r"has shape \[6, 10\], planned for \[3, 10\]"):
        model(batch.repeat(2, 1))


@pytest.mark.slow
def test_another_model_is_refused() -> None:
    _, batch, graph = traced(TiedLanguageModel)
    other = TiedLanguageModel(n_layers=3)
    apply(other, solution_of(graph, baseline(graph)))
    with pytest.raises(PlanMismatchError, match="does not fit this call of TiedLanguageModel"):
        other(batch)


@pytest.mark.slow
def test_autocast_that_was_not_planned_is_refused() -> None:
    model, batch, _ = planned_language_model()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(PlanMismatchError, match="autocast: bfloat16, planned without"),
    ):
        model(batch)


@pytest.mark.slow
def test_replan_makes_a_plan_for_the_new_shape() -> None:
    torch.manual_seed(0)
    model = TiedLanguageModel()
    batch = model.batch()
    optimizer = torch.optim.AdamW(model.parameters())
    solution = solve(model, batch, budget=10**6, optimizer=optimizer)
    plain = copy.deepcopy(model)
    apply(model, solution, on_mismatch="replan")
    for each in (batch, batch[:2], batch[:, :7], batch):
        assert_equal(one_step(plain, each, 0), one_step(model, each, 0))


@pytest.mark.slow
def test_replan_says_when_nothing_fits() -> None:
    model = TiedLanguageModel()
    batch = model.batch()
    graph = trace(model, batch)
    solution = solve(model, batch, budget=baseline_peak_bytes(graph))
    apply(model, solution, on_mismatch="replan")
    with pytest.raises(ReplanError, match="no schedule for it fits"):
        model(batch.repeat(50, 1))


def planned_classifier(**options: Any) -> tuple[nn.Module, nn.Module, Solution]:
    torch.manual_seed(0)
    model, batch = Classifier(), Classifier.batch()
    peak_bytes = solve(model, batch, budget="1GB", loss=model.loss).baseline.peak_bytes
    solution = solve(model, batch, budget=peak_bytes, loss=model.loss)
    return model, apply(copy.deepcopy(model), solution, **options), solution


@pytest.mark.slow
def test_replan_with_a_loss_outside_for_a_smaller_batch() -> None:
    """The loss counts as it was planned, so the step stays within the budget."""
    model, planned, solution = planned_classifier(on_mismatch="replan")
    x, label = model.batch()
    for n_rows in (7, 3, 1):
        assert_bitwise_identical(model, planned, (x[:n_rows], label[:n_rows]), Classifier.loss)
    measured = measure(planned, (x[:3], label[:3]), loss=Classifier.loss)
    assert measured.peak_bytes <= solution.request.available_bytes


@pytest.mark.slow
def test_replan_with_a_loss_outside_for_a_larger_batch_is_refused() -> None:
    _, planned, _ = planned_classifier(on_mismatch="replan")
    x, label = Classifier.batch()
    with pytest.raises(ReplanError, match=r"the loss is computed outside.*other_plan"):
        planned(torch.cat([x, x]), torch.cat([label, label]))


@pytest.mark.slow
def test_replan_from_a_file_knows_the_loss(tmp_path: Path) -> None:
    model, _, solution = planned_classifier()
    path = tmp_path / "schedule.json"
    solution.save(path)
    planned = apply(copy.deepcopy(model), path, on_mismatch="replan")
    x, label = model.batch()
    assert_bitwise_identical(model, planned, (x[:3], label[:3]), Classifier.loss)
    measured = measure(planned, (x[:3], label[:3]), loss=Classifier.loss)
    assert measured.peak_bytes <= solution.request.available_bytes
    saved = json.loads(path.read_text())
    del saved["environment"]["loss_graph"]  # as earlier versions wrote it
    path.write_text(json.dumps(saved))
    apply(model, path, on_mismatch="replan")
    with pytest.raises(ReplanError, match="this schedule file does not contain the loss"):
        model(x[:3], label[:3])


@pytest.mark.slow
def test_several_plans_for_batches_of_several_shapes() -> None:
    model, _, first = planned_classifier()
    x, label = model.batch()
    larger = torch.cat([x, x]), torch.cat([label, label])
    second = solve(model, larger, budget=10**6, loss=model.loss)
    planned = apply(copy.deepcopy(model), [first, second])
    for batch in ((x, label), larger, (x, label)):
        assert_bitwise_identical(model, planned, batch, Classifier.loss)
    with pytest.raises(PlanMismatchError, match="has shape"):
        planned(*(torch.cat([each, each]) for each in larger))


@pytest.mark.slow
def test_plans_of_different_steps_are_refused() -> None:
    model, _, first = planned_classifier()
    summed = solve(model, model.batch(), budget=10**6, loss=model.loss, gradients="accumulate")
    with pytest.raises(ValueError, match="gradients is"):
        apply(model, [first, summed])
    with pytest.raises(ValueError, match="the list is empty"):
        apply(model, [])


@pytest.mark.slow
def test_calls_that_differ_in_where_nothing_stands() -> None:
    plain, planned, x = planned_linear()
    for args in ((x, None, 2.0), (x, 2.0, None), (x,)):
        assert torch.equal(plain(*args)["loss"], planned(*args)["loss"])


class _Named(nn.Module):
    """Named arguments in any order are one call; what comes as **kwargs is read in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, y: Any = None, **more: torch.Tensor) -> torch.Tensor:
        joined = torch.stack([x - y, *more.values()])
        return (torch.sigmoid(joined * self.weight) * torch.arange(len(joined))[:, None]).sum()


def test_named_arguments_in_another_order_are_the_same_call() -> None:
    x, y, p, q = torch.randn(4, 8)
    planned = _Named()
    apply(planned, solve(planned, {"x": x, "y": y, "p": p, "q": q}, budget="1MB"))
    expected = _Named()(p=p, q=q, y=y, x=x)
    assert torch.equal(planned(p=p, q=q, y=y, x=x), expected)
    assert torch.equal(planned(x=x, p=p, y=y, q=q), expected)
    turned = planned(x=x, y=y, q=q, p=p)
    assert torch.equal(turned, _Named()(x=x, y=y, q=q, p=p))
    assert not torch.equal(turned, expected)


def test_a_changed_attribute_is_another_program() -> None:
    plain, planned, x = planned_linear()
    for scale in (1.0, 3.0):
        plain.scale = planned.scale = scale
        assert torch.equal(plain(x)["loss"], planned(x)["loss"])


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_module_made_from_its_attributes_runs_with_its_own_parameters(has_hook: bool) -> None:
    """As in meta-learning (learn2learn, higher): fast weights in a copy of the __dict__."""
    model = nn.Linear(10, 10)
    x = torch.ones(8, 10)
    fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters()))
    model(x).sum().backward()
    fast = {name: 2 * parameter for name, parameter in model.named_parameters()}
    adapted = nn.Linear.__new__(nn.Linear)
    adapted.__dict__ = {**model.__dict__, "_parameters": fast}
    if has_hook:
        adapted.register_forward_hook(lambda *_: None)
    assert_equal(adapted(x), F.linear(x, fast["weight"], fast["bias"]))
    (gradient,) = torch.autograd.grad(adapted(x).sum(), fast["weight"], create_graph=True)
    assert_equal(gradient, x.sum(0).expand(10, 10))


class Delegating(nn.Module):
    """Calls the forward of another module as its own."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped, self.forward = wrapped, wrapped.forward  # type: ignore[method-assign]


def test_a_wrapper_with_the_planned_forward_runs_the_plan() -> None:
    model, x = nn.Linear(10, 10), torch.ones(8, 10)
    expected = Delegating(model)(x)
    fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters()))
    assert_equal(Delegating(model)(x), expected)
    assert len(plans_of(model)) == 1
