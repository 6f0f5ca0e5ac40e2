"""The program that solve has traced runs in apply, and only if a trace would make it again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphs.trace.module_step as tracing
from scheduler_runtime import PlanMismatchError, apply, remove
from solver import Solution, solve
from solver.solving import answer
from tests.support.bitwise import assert_equal

WORLD: dict[str, Any] = {}
"""What forward sees besides the module and the batch, where no guard looks."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.scale = torch.tensor(1.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        for layer in self.layers:
            x = WORLD.get("activation", torch.tanh)(layer(x))
        if mask.all():
            x = x * torch.tensor(WORLD.get("made", 2.0))
        x = self.drop(self.norm(x)) * self.scale * WORLD.get("factor", 1.0)
        with torch.no_grad() if "no_grad" in WORLD else contextlib.nullcontext():
            x = x + x.sin()
        loss = WORLD.get("reduce", torch.mean)(x.square())
        return {"loss": loss} if "dict" in WORLD else (loss,)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(64, 16), torch.ones(64, dtype=torch.bool)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    WORLD.clear()
    yield
    WORLD.clear()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were traced."""
    found: list[nn.Module] = []
    capture = tracing.capture

    def counted(model: nn.Module, *args: Any, **options: Any) -> Any:
        found.append(model)
        return capture(model, *args, **options)

    monkeypatch.setattr(tracing, "capture", counted)
    return found


def planned(model: nn.Module, given: Any = None) -> Solution:
    """Within a budget that takes recomputation."""
    given = batch() if given is None else given
    plain = solve(model, given, budget="1GB", rewrites="none")
    assert plain.variants is not None
    budget = int(0.8 * plain.baseline.peak_bytes)
    return answer(plain.variants, dataclasses.replace(plain.request, budget_bytes=budget))


def trained(model: nn.Module, given: Any) -> list[torch.Tensor]:
    """The loss, the gradients and the buffers of a step."""
    torch.manual_seed(2)
    model.zero_grad()
    (loss,) = output.values() if isinstance(output := model(*given), dict) else output
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers())]


@pytest.mark.slow
def test_solve_and_apply_trace_once(traces) -> None:
    model, plain = Net(), Net()
    solution = planned(model)
    assert solution.simulation.n_recomputed > 0
    apply(model, solution)
    assert_equal(trained(model, batch()), trained(plain, batch()))
    assert traces == [model]
    remove(model)
    apply(model, solution)  # the program is as it was
    assert_equal(trained(model, batch()), trained(plain, batch()))
    assert traces == [model]


@pytest.mark.slow
def test_weights_may_change_meanwhile(traces) -> None:
    model, plain = Net(), Net()
    solution = planned(model)
    for each in (model, plain):
        torch.manual_seed(3)
        with torch.no_grad():
            for tensor in (*each.parameters(), each.norm.running_mean):
                tensor.add_(torch.randn_like(tensor))
    apply(model, solution)
    assert_equal(trained(model, batch()), trained(plain, batch()))
    assert traces == [model]


@pytest.mark.slow
def test_another_batch_of_the_same_form(traces) -> None:
    model, plain = Net(), Net()
    solution = planned(model)
    x, mask = batch()
    apply(model, solution)
    assert_equal(trained(model, (x + 1, mask)), trained(plain, (x + 1, mask)))
    assert traces == [model]


@pytest.mark.slow
def test_parameters_are_found_by_their_paths(traces) -> None:
    model, plain = Net(), Net()
    solution = planned(model)
    for each in (model, plain):
        each.layers.append(each.layers.pop(0))
    apply(model, solution)
    assert_equal(trained(model, batch()), trained(plain, batch()))
    assert traces == [model]


def replaced(model: Net) -> None:
    model.layers[1] = nn.Linear(16, 16, bias=False)


def frozen(model: Net) -> None:
    model.layers[0].weight.requires_grad_(False)


def held(model: Net) -> None:
    model.scale = torch.tensor(3.0)


def evaluated(model: Net) -> None:
    model.drop.eval()


def tied(model: Net) -> None:
    model.layers[2].weight = model.layers[0].weight


CHANGES: dict[str, Callable[[Net], object]] = {
    "replaced": replaced,
    "frozen": frozen,
    "held": held,
    "evaluated": evaluated,
    "tied": tied,
    "activation": lambda _model: WORLD.update(activation=torch.relu),
    "factor": lambda _model: WORLD.update(factor=3.0),
    "made": lambda _model: WORLD.update(made=5.0),
    "no_grad": lambda _model: WORLD.update(no_grad=True),
    "reduce": lambda _model: WORLD.update(reduce=torch.sum),
    "dict": lambda _model: WORLD.update(dict=True),
}
"""Of the module, or of what only a new trace sees."""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_meanwhile_is_traced(change: str, traces) -> None:
    model, plain = Net(), Net()
    solution = planned(model)
    CHANGES[change](model)
    CHANGES[change](plain)
    if change == "replaced":
        plain.layers[1].load_state_dict(model.layers[1].state_dict())
    apply(model, solution)
    with contextlib.suppress(PlanMismatchError):  # it is traced, and perhaps not the planned step
        assert_equal(trained(model, batch()), trained(plain, batch()))
    assert traces[:2] == [model, model]


def other_mask() -> tuple[torch.Tensor, torch.Tensor]:
    x, mask = batch()
    return x, mask.logical_not()


def input_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    x, mask = batch()
    return x.requires_grad_(), mask


def shorter() -> tuple[torch.Tensor, torch.Tensor]:
    x, mask = batch()
    return x[:32], mask[:32]


def strided() -> tuple[torch.Tensor, torch.Tensor]:
    x, mask = batch()
    return x.t().contiguous().t(), mask


@pytest.mark.slow
@pytest.mark.parametrize("other", [other_mask, input_gradient, shorter, strided])
def test_another_kind_of_call_is_traced(other, traces) -> None:
    model, plain = Net(), Net()
    apply(model, planned(model), on_mismatch="replan")
    assert_equal(trained(model, other()), trained(plain, other()))
    assert len(traces) > 1


@pytest.mark.slow
def test_under_autocast_it_is_traced(traces) -> None:
    model = Net()
    apply(model, planned(model))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanMismatchError, match="autocast"):
        model(*batch())
    assert len(traces) == 2


@pytest.mark.slow
def test_another_model_is_traced(traces) -> None:
    solution = planned(Net())
    model, plain = Net(), Net()
    apply(model, solution)
    assert_equal(trained(model, batch()), trained(plain, batch()))
    assert traces[1:] == [model]


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copied_solution_leaves_the_program_behind(copied, traces) -> None:
    model, plain = Net(), Net()
    solution = copied(planned(model))
    assert solution.variants.kept is None
    apply(model, solution)
    assert_equal(trained(model, batch()), trained(plain, batch()))
    assert traces == [model, model]


def test_a_solution_keeps_neither_the_model_nor_the_batch_alive() -> None:
    model, given = Net(), batch()
    solution = planned(model, given)
    assert solution.variants.kept is not None
    tensors = [*model.parameters(), *model.buffers(), *given, model]
    alive = [weakref.ref(each) for each in tensors]
    del model, given, tensors
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


@pytest.mark.slow
def test_attributes_that_a_first_call_fills_are_filled_by_a_trace(traces) -> None:
    class Filled(Net):
        position: torch.Tensor | None = None

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
            if self.position is None:
                self.position = torch.arange(16.0)
            return super().forward(x + self.position, mask)

    model, plain = Filled(), Filled()
    solution = planned(model)
    assert solution.variants.kept is None
    apply(model, solution)
    assert_equal(trained(model, batch()), trained(plain, batch()))


class Reversed(torch.autograd.Function):
    """Gradient reversal: what `amount` is shows in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, amount: float) -> torch.Tensor:
        ctx.amount = amount
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.amount * gradients[0], None


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, threshold: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.threshold = threshold
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < ctx.threshold), None


def hooked(h: torch.Tensor, amount: float) -> torch.Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * amount)
    return h


def hooked_node(h: torch.Tensor, amount: float) -> torch.Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_hook(
            lambda made, _given: tuple(None if m is None else m * amount for m in made)
        )
    return h


def hooked_node_before(h: torch.Tensor, amount: float) -> torch.Tensor:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda given: tuple(g * amount for g in given))
    return h


@torch.library.custom_op("test_kept::reversed", mutates_args=())
def reversed_op(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


reversed_op.register_fake(torch.empty_like)
reversed_op.register_autograd(lambda _ctx, gradient: gradient * WORLD["amount"])


def by_library(h: torch.Tensor, amount: float) -> torch.Tensor:
    WORLD["amount"] = amount
    return reversed_op(h)


BACKWARD: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "reversed": Reversed.apply,
    "straight_through": StraightThrough.apply,
    "hooked": hooked,
    "hooked_node": hooked_node,
    "hooked_node_before": hooked_node_before,
    "by_library": by_library,
}
"""Functions of a tensor and a number that only the backward pass shows."""


class ByNumber(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.name, self.amount = name, 1.0

    def forward(self, x: torch.Tensor) -> Any:
        h = BACKWARD[self.name](self.second(torch.relu(self.first(x))), self.amount)
        return (self.last(torch.relu(h)).mean(),)


def of_number(model: ByNumber, amount: float, given: Any) -> list[torch.Tensor]:
    model.amount = amount
    return trained(model, given)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", BACKWARD)
def test_a_number_of_the_backward_pass_alone_that_changes_before_training(name: str) -> None:
    model, plain, given = ByNumber(name), ByNumber(name), batch()[:1]
    solution = solve(model, given, budget="1GB", rewrites="none")
    model.amount = 0.25
    apply(model, solution, on_mismatch="replan")
    wanted = of_number(plain, 0.25, given)
    assert_equal(of_number(model, 0.25, given), wanted)
    with pytest.raises(AssertionError):  # the number counts
        assert_equal(wanted, of_number(plain, 1.0, given))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", BACKWARD)
def test_a_number_of_the_backward_pass_alone_that_changes_during_training(name: str) -> None:
    model, plain, given = ByNumber(name), ByNumber(name), batch()[:1]
    apply(model, solve(model, given, budget="1GB", rewrites="none"), on_mismatch="replan")
    for amount in (1.0, 0.5, 0.25, 1.0):
        assert_equal(of_number(model, amount, given), of_number(plain, amount, given))


def test_a_kept_program_answers_one_call(traces) -> None:
    """A trace that a changed attribute asks for is made, even for an attribute without effect."""
    model, given = ByNumber("hooked"), batch()[:1]
    apply(model, solve(model, given, budget="1GB", rewrites="none"))
    model.first.unused = 0
    trained(model, given)
    assert traces == [model]
    model.first.unused = 1
    trained(model, given)
    assert traces == [model, model]
