"""`fit`: planned at the first step, with the bits of the plain module."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.model_calls.call import Call, as_call, find_loss
from graphs.trace import trace_module
from graphs.training_step import with_resident
from scheduler_runtime import fit, measure, plans_of, remove, surroundings
from scheduler_runtime.measuring import bytes_of, resident_tensors
from scheduler_runtime.planned import forward, planning
from solver import solve
from solver.sizes_deadlines_progress.sizes import BudgetError
from solver.solving import answer
from tests.support.bitwise import assert_equal, assert_same_gradients
from tests.support.models import NormAndDropout, TiedLanguageModel

adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


class Tower(nn.Module):
    """Residual blocks with dropout and a head; the caller computes the loss."""

    def __init__(self, n_blocks: int = 6, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
            )
            for _ in range(n_blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tower() -> nn.Module:
    torch.manual_seed(0)
    return Tower()


def numbers(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 32, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 10


def cross_entropy(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def trained(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: list[Any],
    *,
    inputs: Callable[[Any], Any] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    n_micro: int = 1,
) -> list[torch.Tensor]:
    """Losses, gradients of the last step, parameters and buffers."""
    torch.manual_seed(1)
    results: list[torch.Tensor] = []
    for step, batch in enumerate(batches):
        if step % n_micro == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        args, kwargs = as_call(batch, inputs)
        output = model(*args, **kwargs)
        value = find_loss(output) if loss is None else loss(output, batch)
        (value / n_micro).backward()
        if (step + 1) % n_micro == 0:
            for optimizer in optimizers:
                optimizer.step()
        results.append(value.detach().clone())
    results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*results, *model.parameters(), *model.buffers()]


FIRST = {"inputs": lambda batch: batch[0], "loss": cross_entropy}


def budget_for(model: nn.Module, batch: Any, share: float, **options: Any) -> int:
    """Bytes: that share of the way from what is resident to the peak without a plan."""
    solution = solve(model, batch, budget="1TB", optimizer=adamw(model.parameters()), **options)
    resident_bytes = solution.graph.resident_bytes
    return int(resident_bytes + share * (solution.baseline.peak_bytes - resident_bytes))


@pytest.mark.slow
def test_a_loss_outside_trains_with_the_same_bits_for_each_shape() -> None:
    plain = tower()
    fitted = copy.deepcopy(plain)
    batches = [numbers(n) for n in (512, 512, 384, 512)]
    budget = budget_for(plain, batches[0], 0.7, **FIRST)
    optimizer = adamw(fitted.parameters())
    assert fit(fitted, budget=budget, optimizer=optimizer) is fitted
    assert plans_of(fitted) == ()
    expected = trained(plain, [adamw(plain.parameters())], batches, **FIRST)
    got = trained(fitted, [optimizer], batches, **FIRST)
    assert len(expected) == len(got)
    assert_equal(expected, got)
    first, second = (plan.solution for plan in plans_of(fitted))
    assert first.simulation.n_recomputed > 0
    assert first.simulation.peak_bytes <= budget < first.baseline.peak_bytes
    assert second.request == first.request
    assert [plan.environment["shapes"] for plan in (first, second)] == [[[512, 32]], [[384, 32]]]


@pytest.mark.slow
@pytest.mark.parametrize("make", [NormAndDropout, TiedLanguageModel])
def test_a_loss_inside_is_planned_as_solve_plans_it(make: Any) -> None:
    torch.manual_seed(0)
    plain = make()
    fitted = copy.deepcopy(plain)
    optimizer = adamw(fitted.parameters())
    solution = solve(plain, make.batch(), budget="1GB", optimizer=adamw(plain.parameters()))
    budget = solution.baseline.peak_bytes + 2**13
    fit(fitted, budget=budget, optimizer=optimizer)
    expected = trained(plain, [adamw(plain.parameters())], 3 * [make.batch()])
    got = trained(fitted, [optimizer], 3 * [make.batch()])
    assert_equal(expected, got)
    (plan,) = plans_of(fitted)
    graph = plan.solution.graph
    kept = graph.tensor_by_name.get("kept_to_run_again")  # in case another output gets a gradient
    assert graph == with_resident(
        solution.graph, "kept_to_run_again", kept.size_bytes if kept else 0
    )
    assert plan.notes == ()


def test_the_measured_peak_is_within_the_budget() -> None:
    model = tower()
    batch = numbers(512)
    budget = budget_for(model, batch, 0.6, **FIRST)
    plain_peak_bytes = measure(
        model, batch, optimizer=adamw(model.parameters()), **FIRST
    ).peak_bytes
    optimizer = adamw(model.parameters())
    fit(model, budget=budget, optimizer=optimizer)
    assert measure(model, batch, optimizer=optimizer, **FIRST).peak_bytes <= budget
    assert plain_peak_bytes > budget


@pytest.mark.slow
def test_accumulated_gradients_are_planned_for_when_they_are_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "checkpoint_solver")
    plain = tower()
    fitted = copy.deepcopy(plain)
    optimizer = adamw(fitted.parameters())
    fit(fitted, budget=budget_for(plain, numbers(256), 0.9, **FIRST), optimizer=optimizer)
    batches = [numbers(256)] * 6
    expected = trained(plain, [adamw(plain.parameters())], batches, n_micro=3, **FIRST)
    got = trained(fitted, [optimizer], batches, n_micro=3, **FIRST)
    assert_equal(expected, got)
    fresh, accumulating = (plan.solution for plan in plans_of(fitted))
    gradients_bytes = sum(p.nbytes for p in fitted.parameters())
    resident = [
        sum(t.size_bytes for t in each.graph.resident if t.name != "loss.held")
        for each in (fresh, accumulating)
    ]
    assert resident[1] == resident[0] + gradients_bytes
    lines = [line for line in caplog.messages if "planned for" in line]
    assert ["with accumulated gradients" in line for line in lines[:2]] == [False, True]


@pytest.mark.slow
def test_several_optimizers_are_counted_together() -> None:
    model = tower()
    optimizers = [adamw(model.blocks.parameters()), torch.optim.SGD(model.head.parameters(), 0.1)]
    fit(model, budget="1GB", optimizer=optimizers)
    trained(model, list(optimizers), [numbers(8)], **FIRST)
    (plan,) = plans_of(model)
    state = plan.solution.graph.tensor_by_name["optimizer_state"]
    sizes = [p.nbytes for p in model.blocks.parameters()]
    assert state.size_bytes == 2 * sum(sizes) + 4 * len(sizes)  # two moments and a step count


@pytest.mark.slow
def test_an_optimizer_that_is_left_out_is_said() -> None:
    model = fit(tower(), budget="1GB")
    with pytest.warns(UserWarning, match="optimizer's state is not counted: pass optimizer="):
        model(numbers(8)[0])
    assert any("pass optimizer=" in note for note in plans_of(model)[0].notes)


def test_an_optimizer_that_the_training_replaces_is_not_kept() -> None:
    model = tower()
    optimizer = adamw(model.parameters())
    fit(model, budget="1GB", optimizer=optimizer)
    trained(model, [optimizer], [numbers(8)] * 2, **FIRST)
    first = weakref.ref(optimizer)
    optimizer = adamw(model.parameters())
    gc.collect()
    assert first() is None
    with pytest.warns(UserWarning, match=r"optimizer that fit was given for .* is gone"):
        trained(model, [optimizer], [numbers(8)], **FIRST)
    with warnings.catch_warnings(action="error"):
        trained(model, [optimizer], [numbers(8)], **FIRST)


@pytest.mark.slow
def test_the_reserve_of_a_loss_outside_is_kept_and_can_be_named() -> None:
    reserved = []
    for loss_reserve in (0, None, 10**6):
        model = fit(tower(), budget="1GB", loss_reserve=loss_reserve, optimizer=[])
        with pytest.warns(UserWarning, match="optimizer"):
            output = model(numbers(512)[0])
        graph = plans_of(model)[0].solution.graph
        (loss,) = (node for node in graph.nodes if node.phase == "outside")
        held = sum(t.size_bytes for t in graph.resident if t.name == "loss.held")
        reserved.append((loss.workspace_bytes, held))
    one_bytes = output.numel() * 4
    two_bytes = 2 * one_bytes
    assert reserved == [(0, 0), (3 * one_bytes, two_bytes), (10**6 - two_bytes, two_bytes)]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.first(x))
        return {"hidden": hidden, "logits": self.second(hidden)}


def test_outputs_that_the_loss_leaves_out_are_named() -> None:
    torch.manual_seed(0)
    plain = TwoHeads()
    x = torch.randn(6, 8)
    named = copy.deepcopy(plain)
    sgd = torch.optim.SGD(named.parameters())
    fit(named, budget="1GB", optimizer=sgd, loss_outputs=lambda output: output["logits"])
    for model in (plain, named):
        model(x)["logits"].sum().backward()
    assert len(plans_of(named)) == 1
    assert_same_gradients(plain, named)


def test_evaluation_and_no_grad_run_the_modules_own_forward() -> None:
    model = fit(tower(), budget="1GB")
    with torch.no_grad():
        model(numbers(8)[0])
    model.eval()
    with pytest.warns(UserWarning, match="Tower is in evaluation mode"):
        model(numbers(8)[0]).sum().backward()
    assert plans_of(model) == ()
    assert "forward" not in vars(remove(model))


@pytest.mark.slow
def test_a_share_of_the_memory_is_rounded_down_to_bytes() -> None:
    batch = numbers(8)
    model = fit(tower(), budget=0.85 * (10**9 + 1), reserve=0.1 * 25, loss_reserve=1.5)
    cross_entropy(model(batch[0]), batch).backward()
    request = plans_of(model)[0].solution.request
    assert (request.budget_bytes, request.reserve_bytes) == (850_000_000, 2)
    with pytest.raises(BudgetError, match=r"invalid budget 0\.85: .* write 0\.85 \* its bytes"):
        fit(tower(), budget=0.85)


@pytest.mark.slow
def test_a_model_without_gradients_runs_as_it_is_and_is_planned_when_it_has_some() -> None:
    """As adapters that are switched off for a while leave it."""
    model = fit(tower().requires_grad_(False), budget="1GB")
    assert not model(numbers(8)[0]).requires_grad
    assert not plans_of(model)
    model.requires_grad_(True)
    model(numbers(8)[0]).sum().backward()
    assert plans_of(model)


def test_auto_takes_what_is_free_and_what_the_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 2_500)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 3_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (5_000, 10_000))
    monkeypatch.setattr(surroundings, "bytes_of", lambda _tensors, _device: 1_800)
    call, device = Call.of((numbers(8)[0],), {}), torch.device("cuda")
    found = surroundings.free_budget_bytes(tower(), call, [], device, bucket_bytes=200)
    assert found == 5_000 + 3_000 - 500


def test_what_a_step_has_on_the_device_counts_each_storage_once() -> None:
    torch.manual_seed(0)
    model = TiedLanguageModel()
    tokens = TiedLanguageModel.batch()
    optimizer = adamw(model.parameters())
    parameters_bytes = sum(p.nbytes for p in model.parameters())

    def resident_bytes() -> int:
        return bytes_of(resident_tensors(model, [tokens], [optimizer]), torch.device("cpu"))

    assert resident_bytes() == parameters_bytes + tokens.nbytes
    model(tokens).backward()
    optimizer.step()
    counts_bytes = sum(state["step"].nbytes for state in optimizer.state.values())
    assert resident_bytes() == 4 * parameters_bytes + tokens.nbytes + counts_bytes


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_that_is_compiled_afterwards_runs_its_plan_uncompiled(in_place: bool) -> None:
    plain = tower()
    fitted = copy.deepcopy(plain)
    optimizer = adamw(fitted.parameters())
    fit(fitted, budget=budget_for(plain, numbers(256), 0.8, **FIRST), optimizer=optimizer)
    compiled = fitted if in_place else torch.compile(fitted, backend="eager")
    if in_place:
        fitted.compile(backend="eager")
    expected = trained(plain, [adamw(plain.parameters())], [numbers(256)] * 2, **FIRST)
    got = trained(compiled, [optimizer], [numbers(256)] * 2, **FIRST)
    assert_equal(expected, got)
    assert [
        p.solution.simulation.n_recomputed > 0 for p in plans_of(fitted) if p.solution.simulation
    ] == [True]


@pytest.mark.slow
def test_a_copy_plans_for_itself() -> None:
    model = tower()
    optimizer = adamw(model.parameters())
    fit(model, budget="1GB", optimizer=optimizer)
    model(numbers(8)[0])
    twin = copy.deepcopy(model)
    assert plans_of(twin) == ()
    with pytest.warns(UserWarning, match="optimizer"):
        twin(numbers(8)[0]).sum().backward()
    assert len(plans_of(twin)) == 1
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_shorter_calls_are_planned_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits and budget hold; a longer call than planned is searched for, once. The second call is
    that of the first, whose plan is made anew for the loss."""
    plain = tower()
    fitted = copy.deepcopy(plain)
    batches = [numbers(n) for n in (512, 512, 480, 509, 64, 600, 590, 512)]
    optimizer = adamw(fitted.parameters())
    budget = budget_for(plain, batches[0], 0.7, **FIRST)
    fit(fitted, budget=budget, optimizer=optimizer)
    searched: list[Any] = []
    monkeypatch.setattr(planning, "answer", lambda *a, **k: searched.append(a) or answer(*a, **k))
    expected = trained(plain, [adamw(plain.parameters())], batches, **FIRST)
    got = trained(fitted, [optimizer], batches, **FIRST)
    assert_equal(expected, got)
    plans = plans_of(fitted)
    assert [plan.reused for plan in plans] == [False, True, True, True, False, True]
    assert len(searched) == 3
    for plan in plans:
        assert plan.solution.simulation.peak_bytes <= budget
    assert [plan.solution.simulation.n_recomputed > 0 for plan in plans] == [
        *(True, True, True, False, True, True)
    ]
    for n in (480, 600):
        measured = measure(fitted, numbers(n), optimizer=optimizer, **FIRST)
        assert measured.peak_bytes <= budget


@pytest.mark.slow
def test_a_trace_does_not_search_the_programs_of_other_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is traced is searched for tensors, and all plans hang on the replaced forward."""
    model = tower()
    seen: list[Any] = []

    def recorded(model: nn.Module, *args: Any, **options: Any) -> Any:
        seen.append(model.__dict__.get("forward"))
        return trace_module(model, *args, **options)

    monkeypatch.setattr(forward, "trace_module", recorded)
    fit(model, budget="1GB", optimizer=adamw(model.parameters()))
    for n in (8, 4):
        model(numbers(n)[0])
    assert len(seen) == 2
    assert not any(isinstance(each, forward.PlannedForward) for each in seen)
