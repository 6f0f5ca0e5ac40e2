"""Parts that cannot be traced: one node each, within the budget, with the bits of eager mode."""

from __future__ import annotations

import copy
import gc
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from graphs.trace import trace
from scheduler_runtime import apply, fit
from scheduler_runtime.measuring import measure
from solver.schedule import Solution, simulate
from solver.solving import solve
from tests.support.bitwise import assert_equal
from tests.support.opaque_models import (
    PARTS,
    ROWS,
    WIDTH,
    Distilled,
    Mean,
    Network,
    Probabilities,
    SeveralUses,
    WithTable,
    network,
)

ADAMW = torch.optim.AdamW


def half_of_activations(model: nn.Module, batch: Tensor, **options: Any) -> Solution:
    """The plan at a budget in the middle between what is resident and the plain step."""
    free = solve(model, batch, budget="1GB", optimizer=ADAMW, **options)
    budget = (free.baseline.peak_bytes + free.graph.resident_bytes) // 2
    found = solve(free.graph, budget=budget)
    assert found.simulation == simulate(found.graph, found.schedule)
    return found


def opaque_nodes(solution: Solution) -> list[str]:
    return [node.name for node in solution.graph.nodes if node.op.startswith("opaque_forward")]


def train(
    model: nn.Module,
    batch: Tensor,
    *,
    n_micro: int = 1,
    around: Callable[[], Any] | None = None,
    n_steps: int = 3,
) -> list[Tensor | None]:
    """Losses, gradients and buffers of a few steps."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    found: list[Tensor | None] = []
    for _ in range(n_steps):
        optimizer.zero_grad(set_to_none=n_micro == 1)
        for _ in range(n_micro):
            if around is None:
                loss = model(batch)
            else:
                with around():
                    loss = model(batch)
            loss.backward()
        found.append(loss.detach())
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return found + [buffer.clone() for buffer in model.buffers()]


def peak_bytes(model: nn.Module, batch: Tensor) -> int:
    model.zero_grad()
    gc.collect()
    random.seed(0)
    return measure(model, batch, optimizer=ADAMW(model.parameters()), n_steps=1).peak_bytes


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", PARTS)
def test_half_of_the_activations(name: str) -> None:
    plain, batch = network(name)
    model = copy.deepcopy(plain)
    solution = half_of_activations(model, batch)
    assert len(opaque_nodes(solution)) >= 4
    assert "planned as one piece" in " ".join(solution.graph.meta.notes)
    apply(model, solution)
    assert_equal(train(plain, batch), train(model, batch))
    assert peak_bytes(model, batch) <= solution.request.available_bytes


@pytest.mark.slow
def test_a_part_is_recomputed_whole_with_the_same_random_numbers() -> None:
    plain, batch = network("LayerDrop")
    model = copy.deepcopy(plain)
    graph = solve(model, batch, budget="1GB", optimizer=ADAMW).graph
    least = solve(graph, budget=graph.resident_bytes + 1).obstacle.reached_bytes
    solution = solve(graph, budget=least)
    order = solution.schedule.order
    assert any(order.count(name) > 1 for name in opaque_nodes(solution))
    apply(model, solution)
    assert_equal(train(plain, batch), train(model, batch))


@pytest.mark.slow
def test_mixtral_with_a_loop_over_its_experts() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixtral = transformers.MixtralForCausalLM(config)
            self.mixtral.set_experts_implementation("eager")

        def forward(self, ids: Tensor) -> Tensor:
            return self.mixtral(ids, labels=ids).loss

    plain, batch = Language(), torch.randint(0, 64, (4, 64))
    model = copy.deepcopy(plain)
    solution = half_of_activations(model, batch)
    assert len(opaque_nodes(solution)) == 3
    apply(model, solution)
    assert_equal(train(plain, batch), train(model, batch))
    assert peak_bytes(model, batch) <= solution.request.available_bytes


@pytest.mark.slow
def test_a_call_that_keeps_more_than_planned_is_planned_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def masked(sign: float) -> tuple[nn.Module, Tensor]:
        """Its masks pick few rows, or nearly all."""
        model, batch = network("boolean mask", n_blocks=1)
        with torch.no_grad():
            model.embed.weight.abs_().mul_(sign)
        return model, batch

    few, batch = masked(-1.0)
    solution = solve(few, batch, budget="1GB")
    most, _ = masked(1.0)
    plain = copy.deepcopy(most)
    apply(most, solution)
    assert_equal(train(plain, batch, n_steps=1), train(most, batch, n_steps=1))
    assert "'parts.0', which is planned as one piece, saves or reads other" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "several uses", "LSTM"])
def test_gradients_that_accumulate(name: str) -> None:
    plain, batch = network(name, n_blocks=2)
    model = copy.deepcopy(plain)
    apply(model, half_of_activations(model, batch, gradients="accumulate"))
    assert_equal(train(plain, batch, n_micro=2), train(model, batch, n_micro=2))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["experts", "several uses", "branch"])
def test_under_autocast(name: str) -> None:
    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    plain, batch = network(name, n_blocks=4)
    model = copy.deepcopy(plain)
    with autocast():
        solution = half_of_activations(model, batch)
    assert opaque_nodes(solution)
    apply(model, solution)
    assert_equal(train(plain, batch, around=autocast), train(model, batch, around=autocast))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", ["several uses", "branch", "experts"])
def test_a_module_that_is_called_several_times(name: str) -> None:
    plain, batch = network(name, n_blocks=3, shared=True)
    model = copy.deepcopy(plain)
    solution = half_of_activations(model, batch)
    assert len(opaque_nodes(solution)) == 3
    apply(model, solution)
    assert_equal(train(plain, batch), train(model, batch))


@pytest.mark.slow
def test_fit_and_schedule_files(tmp_path: Any) -> None:
    plain, batch = network("experts", n_blocks=2)
    expected = train(plain, batch)
    fresh, _ = network("experts", n_blocks=2)
    solution = half_of_activations(fresh, batch)
    solution.save(tmp_path / "schedule.json")
    apply(fresh, tmp_path / "schedule.json")
    assert_equal(expected, train(fresh, batch))
    fitted, _ = network("experts", n_blocks=2)
    fit(fitted, optimizer=ADAMW(fitted.parameters()), budget="1GB")
    assert_equal(expected, train(fitted, batch))


@pytest.mark.slow
def test_inputs_without_gradients_and_frozen_parameters() -> None:
    plain, batch = network("several uses", n_blocks=2)
    plain.embed.weight.requires_grad_(False)
    plain.parts[1].a.weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    solution = solve(model, batch, budget="1GB")
    first = solution.graph.node_by_name["opaque_forward"]
    again = solution.graph.node_by_name["opaque_forward_1"]
    saved = solution.graph.tensor_by_name
    assert saved[first.outputs[-1]].size_bytes <= saved[again.outputs[-1]].size_bytes
    apply(model, solution)
    assert_equal(train(plain, batch, n_steps=1), train(model, batch, n_steps=1))


@pytest.mark.slow
def test_what_a_call_has_saved_goes_when_it_is_freed() -> None:
    """Measured: the plan's own peak, in which each part is there once."""
    model, batch = network("experts", n_blocks=2)
    solution = solve(model, batch, budget="1GB", optimizer=ADAMW)
    apply(model, solution)
    assert peak_bytes(model, batch) <= solution.simulation.peak_bytes


def test_a_part_is_measured_under_the_users_profiler() -> None:
    model, batch = network("branch", n_blocks=1)
    expected = trace(model, batch)
    with torch.autograd.profiler.profile():
        graph = trace(model, batch)
    assert graph.meta.environment["opaque"] == expected.meta.environment["opaque"]


@pytest.mark.slow
def test_tracing_leaves_no_trace() -> None:
    model, batch = network("branch", n_blocks=1)
    before = copy.deepcopy(model.state_dict())
    state, others = torch.get_rng_state(), random.getstate()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    trace(model, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert others == random.getstate()
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_a_part_that_reads_its_input_several_times_adds_gradients_as_eager_does() -> None:
    """Its input is read outside as well: the sums have more than two terms."""
    torch.manual_seed(0)
    plain = Network(SeveralUses, n_blocks=1)
    batch = torch.randint(0, 50, (64,))
    model = copy.deepcopy(plain)
    apply(model, solve(model, batch, budget="1GB"))
    assert_equal(train(plain, batch, n_steps=1), train(model, batch, n_steps=1))


@pytest.mark.slow
def test_an_output_in_another_layout_than_planned() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Probabilities(), nn.Linear(8, 1), Mean())
    model, batch = copy.deepcopy(plain), torch.randn(8, WIDTH)
    apply(model, solve(model, batch, budget="1GB"))
    for bias in (0.0, 200.0):
        for each in (plain, model):
            with torch.no_grad():
                each[1].linear.bias[0] = bias
            each.zero_grad()
            each(batch).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.slow
def test_a_part_that_is_called_without_gradients() -> None:
    torch.manual_seed(0)
    plain = Distilled()
    model, batch = copy.deepcopy(plain), torch.randn(8, WIDTH)
    solution = solve(model, batch, budget="1GB")
    (node,) = opaque_nodes(solution)
    *_, saved = solution.graph.node_by_name[node].outputs
    assert solution.graph.tensor_by_name[saved].size_bytes == 0
    apply(model, solution)
    assert_equal(train(plain, batch, n_steps=2), train(model, batch, n_steps=2))


@pytest.mark.slow
def test_a_warning_where_a_later_batch_keeps_more(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), WithTable(), Mean())
    batch = torch.randn(ROWS, WIDTH)
    apply(model, solve(model, batch, budget="1GB"))
    model(batch).backward()
    assert "planned as one piece, saves" not in caplog.text
    with torch.no_grad():
        model[0].bias.fill_(10.0)
    for _ in range(2):
        model(batch).backward()
    (text,) = [r.getMessage() for r in caplog.records if "bytes for backward" in r.getMessage()]
    here, planned = map(int, re.findall(r"(\d+)(?: bytes for|\. What)", text))
    assert "'1', which is planned as one piece, saves" in text
    assert here > planned
