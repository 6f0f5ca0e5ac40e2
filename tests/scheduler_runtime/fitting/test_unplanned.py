"""`fit` on a module that the training never calls: another part is planned, or it is told."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from scheduler_runtime import FitError, fit, plans_of, remove
from tests.scheduler_runtime.fitting.test_fitting import Tower, numbers
from tests.support.bitwise import assert_equal


class Whole(nn.Module):
    """Has a forward; the training may call what is in it instead."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.register_buffer("table", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            x = part(x)
        return x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / 2


def step(model: nn.Module, run: Callable[[Any], Any]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x, y = numbers(64)
    F.cross_entropy(run(x), y).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def fitted(model: nn.Module, **options: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return fit(model, budget="1GB", optimizer=torch.optim.SGD(trained), **options)


def test_the_part_that_the_training_calls_is_planned() -> None:
    plain = Whole(inner=Whole(model=Tower(2)))
    model = fitted(copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            expected = step(plain, plain.inner.model)
            got = step(model, model.inner.model)
            assert_equal(expected, got)
    (plan,) = plans_of(model)
    (of_part,) = plans_of(model.inner.model)
    assert plan is of_part
    rest = plan.solution.graph.tensor_by_name["rest_of_the_module"]
    assert rest.size_bytes == model.table.nbytes + model.inner.table.nbytes
    remove(model)
    assert all("forward" not in vars(each) for each in model.modules())


def test_a_call_of_the_whole_is_planned_as_the_whole() -> None:
    model = fitted(Whole(inner=Whole(model=Tower(2))))
    assert "forward" in vars(model.inner.model)
    with torch.no_grad():
        model.inner.model(numbers(8)[0])
    model.eval()
    model.inner.model(numbers(8)[0])
    model.train()
    assert not plans_of(model)
    step(model, model)
    assert len(plans_of(model)) == 1
    assert "rest_of_the_module" not in plans_of(model)[0].solution.graph.tensor_by_name
    assert [path for path, each in model.named_modules() if "forward" in vars(each)] == [""]


@pytest.mark.slow
def test_the_whole_may_still_be_called_after_a_part_was() -> None:
    plain = Whole(inner=Tower(2))
    model = fitted(copy.deepcopy(plain))
    for run in ("inner", ""):
        expected = step(plain, plain.get_submodule(run))
        got = step(model, model.get_submodule(run))
        assert_equal(expected, got)
    assert "forward" not in vars(model.inner)


def method(model: Any) -> Callable[[Any], Any]:
    return lambda x: model.head.half(model.tower(x))


def in_turn(model: Any) -> Callable[[Any], Any]:
    return lambda x: model.head(model.tower(x))


def head_by_its_method(model: Any) -> Callable[[Any], Any]:
    model.tower.requires_grad_(False)
    return lambda x: model.head.half(model.tower(x))


def in_evaluation(model: Any) -> Callable[[Any], Any]:
    return model.eval()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (in_turn, "The gradients are those of tower, head. If the training calls these, or"),
        (method, "The gradients are those of tower, head. "),
        (head_by_its_method, r"of head\.layer\..* fit\(model\.head\.layer, \.\.\.\), FitCallback"),
        (in_evaluation, r"Whole is in evaluation mode, .* call train\(\) on it before"),
    ],
)
def test_what_is_never_called_is_told_at_the_first_gradients(run: Any, words: str) -> None:
    for unplanned, expected in (("warn", UserWarning), ("error", FitError)):
        model = fitted(Whole(tower=Tower(2), head=Head()), unplanned=unplanned)
        go = run(model)
        check = pytest.warns if unplanned == "warn" else pytest.raises
        with check(expected, match=words):
            step(model, go)
        assert not plans_of(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, go)  # it was told


def test_copies_with_computed_parameters_are_named() -> None:
    """As `higher` and `clone_module` of learn2learn make them: with the attributes of the model."""
    model = fitted(Head())
    layer: Any = nn.Linear.__new__(nn.Linear)
    adapted: Any = Head.__new__(Head)
    for made, of in ((layer, model.layer), (adapted, model)):
        made.__dict__ = {**vars(of), "_parameters": {}, "_modules": {}}
    layer._parameters = {name: 2.0 * p for name, p in model.layer.named_parameters()}
    adapted._modules = {"layer": layer}
    with pytest.warns(
        UserWarning, match=r"through copies with computed parameters .*copy\.deepcopy"
    ):
        adapted(torch.randn(2, 10)).sum().backward()


class Step(nn.Module):
    """What docs/faq.md and the warning advise: its forward calls methods of the model's parts."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return method(self.whole)(x)


def test_methods_are_planned_in_a_small_module_around_the_model() -> None:
    model = Whole(tower=Tower(2), head=Head())
    plain = copy.deepcopy(model)
    expected = step(plain, method(plain))
    planned = fitted(Step(model))
    assert_equal(expected, step(planned, planned))
    assert plans_of(planned)


def test_a_part_that_was_left_in_evaluation_mode_is_named() -> None:
    """Trainers call train() on the module that they know, or on none."""
    model = fitted(Whole(tower=Tower(2)))
    model.tower.eval()
    with pytest.warns(UserWarning, match="tower is in evaluation mode"):
        step(model, model.tower)


def test_nothing_is_left_behind_by_remove_and_by_a_plan() -> None:
    for end in (remove, lambda model: step(model, model)):
        model = fitted(Whole(tower=Tower(2), head=Head()))
        end(model)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.slow
def test_copies_before_the_first_step_plan_for_themselves() -> None:
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        for run in ("", "inner"):
            twin = copied(fitted(Whole(inner=Tower(2))))
            with pytest.warns(UserWarning, match="pass optimizer="):
                step(twin, twin.get_submodule(run))
            assert len(plans_of(twin)) == 1
            remove(twin)
            assert all("forward" not in vars(each) for each in twin.modules())


def test_frozen_parameters_beside_the_part_are_counted() -> None:
    model = Whole(teacher=Tower(2).requires_grad_(False), student=Tower(2))
    fitted(model)
    step(model, model.student)
    (plan,) = plans_of(model)
    rest = plan.solution.graph.tensor_by_name["rest_of_the_module"]
    assert rest.size_bytes == sum(p.nbytes for p in model.teacher.parameters()) + model.table.nbytes


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="unplanned is 'silent'; one of warn, error"):
        fitted(Tower(1), unplanned="silent")


class Scaled(nn.Module):
    """The loss, which is outside, reads a parameter of the model as well (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 10)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def loss_of_representations(model: Scaled, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss of outputs that were computed without gradients, as in GradCache."""
    with torch.no_grad():
        outputs = model(x)
    outputs.requires_grad_()
    F.cross_entropy(outputs * model.scale, y).backward()
    return outputs.grad


def test_a_loss_of_outputs_without_gradients_does_not_count_as_training() -> None:
    model = fitted(Scaled(), unplanned="error")
    x, y = numbers(64)
    for _ in range(2):
        gradient = loss_of_representations(model, x, y)
        for part, of_part in zip(x.split(32), gradient.split(32), strict=True):
            model(part).backward(of_part)
    assert plans_of(model)


def test_a_training_that_only_calls_it_without_gradients_is_told() -> None:
    model = fitted(Scaled(), unplanned="error")
    loss_of_representations(model, *numbers(64))
    with pytest.raises(FitError, match="The gradients are those of its own parameters"):
        loss_of_representations(model, *numbers(64))
