"""Running a schedule: the same bits as without one, and refusals instead of wrong numbers."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphs.graph import Graph
from graphs.trace import trace
from scheduler_runtime import PlanMismatchError, apply, remove
from scheduler_runtime.measuring import measure
from solver.methods.registry import METHODS
from solver.schedule.ops import free_after_last_use
from solver.schedule.recompute import baseline, keep, missing_computes
from solver.schedule.simulator import simulate
from solver.schedule.solution import Request
from solver.solving import answer
from tests.support.bitwise import (
    MODELS,
    assert_bitwise_identical,
    assert_equal,
    one_step,
    solution_of,
    traced,
)
from tests.support.budgets import baseline_peak_bytes
from tests.support.models import Classifier, TiedLanguageModel


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("gradients", ["fresh", "accumulate"])
def test_keeping_nothing_gives_the_same_bits(make: Any, gradients: str) -> None:
    model, batch, graph = traced(make, gradients=gradients)
    schedule = keep(graph, set())
    assert simulate(graph, schedule).n_recomputed > 0
    planned = apply(copy.deepcopy(model), solution_of(graph, schedule))
    assert_bitwise_identical(model, planned, batch, getattr(make, "loss", None))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_random_sets_of_kept_tensors_give_the_same_bits(make: Any, seed: int) -> None:
    model, batch, graph = traced(make)
    choice = random.Random(seed)
    kept = {t.name for t in graph.tensors if choice.random() < 0.5}
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, kept)))
    assert_bitwise_identical(model, planned, batch, getattr(make, "loss", None))


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("make", MODELS)
def test_recomputing_again_and_again_gives_the_same_bits(make: Any) -> None:
    """Nothing made again is held: every later op makes all that it reads anew."""
    model, batch, graph = traced(make)
    pinned = {
        name for node in graph.forward_nodes if not node.recomputable for name in node.outputs
    }
    later = {name for node in graph.later_nodes for name in node.outputs}
    resident = {tensor.name for tensor in graph.resident}
    order = [node.name for node in graph.forward_nodes]
    for node in graph.later_nodes:
        order += missing_computes(graph, node.inputs, resident | pinned | later)
        order.append(node.name)
    schedule = free_after_last_use(graph, order)
    runs = simulate(graph, schedule).n_recomputed
    assert runs >= len(order) // 3
    planned = apply(copy.deepcopy(model), solution_of(graph, schedule))
    assert_bitwise_identical(model, planned, batch, getattr(make, "loss", None))


class Tower(nn.Module):
    """Equal blocks with dropout, few enough for the integer program, for which all methods have a
    plan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 64) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(64, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + functional.dropout(down(functional.gelu(up(x))), 0.2)
        return x.square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(512, 16)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_bits(method: str) -> None:
    model, batch, graph = traced(Tower)
    peak_bytes = baseline_peak_bytes(graph)
    budget_bytes = peak_bytes if method == "none" else (peak_bytes * 85) // 100
    solution = answer(graph, Request(budget_bytes, method=method, time_limit_s=600))
    assert (solution.simulation.n_recomputed > 0) == (method != "none")
    planned = apply(copy.deepcopy(model), solution)
    assert_bitwise_identical(model, planned, batch)


class WrittenOutAttention(nn.Module):
    """Under autocast the softmax is in 32 bits, and so are the products of its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).float().chunk(3, dim=-1)
        with torch.autocast("cpu", enabled=False):
            scores = torch.softmax(q @ k.transpose(1, 2), dim=-1)
            return (scores @ v).square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [TiedLanguageModel, WrittenOutAttention])
def test_autocast_gives_the_same_bits(make: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model, batch, graph = traced(make)
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    results = []
    for each in (model, planned):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters())])
    assert_equal(*results)


@pytest.mark.slow
def test_accumulation_over_micro_batches_gives_the_same_bits() -> None:
    model, batch, graph = traced(TiedLanguageModel, gradients="accumulate")
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    for seed in range(3):
        assert_equal(one_step(model, batch, seed), one_step(planned, batch, seed))


@pytest.mark.slow
def test_frozen_parameters_and_inputs_that_need_gradients() -> None:
    torch.manual_seed(0)
    model = Classifier()
    model.layers[0].weight.requires_grad_(False)
    x, label = model.batch()
    x.requires_grad_(True)
    graph = trace(model, (x, label), loss=model.loss)
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    gradients = []
    for each in (model, planned):
        x.grad = None
        torch.manual_seed(1)
        each.loss(each(x, label), (x, label)).backward()
        gradients.append([x.grad, *(p.grad for p in each.parameters())])
    assert gradients[1][1] is None
    assert_equal(*gradients)


def planned_language_model() -> tuple[nn.Module, Any, Graph]:
    model, batch, graph = traced(TiedLanguageModel)
    apply(model, solution_of(graph, keep(graph, set())))
    return model, batch, graph


@pytest.mark.slow
def test_the_module_stays_the_same_object() -> None:
    model, _, graph = traced(TiedLanguageModel)
    names = list(model.state_dict())
    signature = inspect.signature(model.forward)
    assert apply(model, solution_of(graph, baseline(graph))) is model
    assert list(model.state_dict()) == names
    assert inspect.signature(model.forward) == signature
    with pytest.raises(ValueError, match="already has a plan, from apply; call remove"):
        apply(model, solution_of(graph, baseline(graph)))
    assert remove(model) is model
    assert "forward" not in vars(model)
    with pytest.raises(ValueError, match="no plan is applied"):
        remove(model)


@pytest.mark.slow
def test_evaluation_runs_the_module_itself() -> None:
    model, batch, _ = planned_language_model()
    model.eval()
    own = type(model).forward(model, batch)
    assert torch.equal(model(batch), own)
    model.train()
    with torch.no_grad():
        assert not model(batch).requires_grad


@pytest.mark.slow
def test_a_plan_of_a_step_in_evaluation_mode_runs_in_that_mode_only() -> None:
    model = Classifier().eval()
    x, label = model.batch()
    graph = trace(model, (x, label), loss=model.loss)
    apply(model, solution_of(graph, keep(graph, set())))
    model.loss(model(x, label), (x, label)).backward()
    with pytest.raises(PlanMismatchError, match="in training mode, and was planned in evaluation"):
        model.train()(x, label)


@pytest.mark.slow
def test_hooks_on_parameters_and_modules_fire_once() -> None:
    model, batch, _ = planned_language_model()
    fired: list[str] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: fired.append("parameter"))
    model.register_forward_hook(lambda *_: fired.append("forward"))
    model(batch).backward()
    assert fired == ["forward", "parameter"]


@pytest.mark.slow
def test_gradients_leave_before_the_backward_pass_is_over() -> None:
    model, batch, _ = planned_language_model()
    seen: list[int] = []
    parameters = list(model.parameters())

    def note(_parameter: torch.Tensor) -> None:
        seen.append(sum(p.grad is not None for p in parameters))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(note)
    model(batch).backward()
    assert seen[0] < len(parameters) / 2
    assert seen[-1] == len(parameters)


@pytest.mark.slow
def test_copies_of_a_planned_module_run_by_themselves() -> None:
    model, batch, _ = planned_language_model()
    expected = one_step(model, batch, 0)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    model.zero_grad()
    assert_equal(expected, one_step(twin, batch, 0))
    assert all(p.grad is None for p in model.parameters())


class MomentumEncoder(nn.Module):
    """Its second tower is an average of the first, updated in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.average = copy.deepcopy(self.trained).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            pairs = zip(self.average.parameters(), self.trained.parameters(), strict=True)
            for average, trained in pairs:
                average.mul_(0.9).add_(trained, alpha=0.1)
            target = self.average(x)
        return (self.trained(x) - target).square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(4, 8)


def test_frozen_parameters_that_forward_updates() -> None:
    model, batch, graph = traced(MomentumEncoder)
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    for seed in range(3):
        assert_equal(one_step(model, batch, seed), one_step(planned, batch, seed))
        assert_equal(model.parameters(), planned.parameters())


@pytest.mark.slow
def test_a_schedule_file_runs_in_a_model_made_anew(tmp_path: Path) -> None:
    model, batch, graph = traced(TiedLanguageModel)
    path = tmp_path / "schedule.json"
    solution_of(graph, keep(graph, set())).save(path)
    planned = apply(copy.deepcopy(model), path)
    assert_bitwise_identical(model, planned, batch)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda m: nn.Sequential(m), lambda m: m])
def test_a_planned_module_inside_another(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, batch, _ = planned_language_model()
    wrap(model)(batch).backward()
    assert all(p.grad is not None for p in model.parameters())


class Linear(nn.Module):
    """A layer between two others: its backward reads the weight through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scale = 1.0

    def forward(self, x: torch.Tensor, bias: Any = None, factor: Any = None) -> dict[str, Any]:
        y = self.layers(x) * self.scale
        y = y if bias is None else y + bias
        y = y if factor is None else y * factor
        return {"loss": y.sum(), "logits": y, "extra": None}


def planned_linear() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    plain, x = Linear(), torch.randn(3, 4)
    graph = trace(plain, x)
    planned = copy.deepcopy(plain)
    apply(planned, solution_of(graph, keep(graph, set())), on_mismatch="replan")
    return plain, planned, x


def test_nothing_among_the_outputs_stays_nothing() -> None:
    _, planned, x = planned_linear()
    assert planned(x)["extra"] is None


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("both", torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.both.chunk(2)
        y = torch.tanh(self.layer(x) * low.exp() + high.exp())
        self.both.add_(1.0)
        return y.square().sum()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.ones(2, 4)


def test_parts_of_a_buffer_that_changes_are_not_read_again() -> None:
    model, batch, graph = traced(_Buffered)
    planned = apply(copy.deepcopy(model), solution_of(graph, keep(graph, set())))
    for seed in range(2):
        assert_equal(one_step(model, batch, seed), one_step(planned, batch, seed))


class Summed(nn.Module):
    """Three parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(256, 256) / 16 for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.weights
        return torch.tanh(x @ (a + b + c)).square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(32, 256)


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_gradient_that_parameters_share_is_copied_no_more_often_than_planned(
    with_optimizer: bool,
) -> None:
    model, batch, graph = traced(Summed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if with_optimizer else None
    planned = apply(model, solution_of(graph, keep(graph, set())))
    predicted_bytes = simulate(graph, keep(graph, set())).peak_bytes
    measured_bytes = measure(planned, batch, optimizer=optimizer).peak_bytes
    assert measured_bytes == pytest.approx(predicted_bytes, abs=10_000)
