"""The peak without a plan that `fit` quotes: that of `solve`, and what eager mode takes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.costs import cpu_peak_bytes
from graphs.trace import trace
from graphs.training_step import with_dropped_outputs
from scheduler_runtime import apply, fit, measure, remove
from scheduler_runtime.fitting import plans_of
from solver import solve
from solver.schedule import simulate_unplanned
from solver.sizes_deadlines_progress import format_size

N_NODES, N_EDGES, WIDTH, N_CLASSES = 200, 1600, 16, 10
WITHIN = 0.002
Loss = Callable[[Any, Any], torch.Tensor]


class GraphAttention(nn.Module):
    """Its variables hold tensors that no later operator reads: only a rehearsal knows."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(2 * WIDTH, 1)
        self.head = nn.Linear(WIDTH, N_CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            z = self.project(x)
            both = torch.cat((z[edges[0]], z[edges[1]]), -1)
            scores = F.leaky_relu(self.score(both))
            weights = torch.exp(scores - scores.max())
            sums = torch.zeros(len(x), 1).index_add_(0, edges[1], weights)
            shares = weights / sums[edges[1]].clamp(min=1e-6)
            x = F.elu(torch.zeros_like(z).index_add_(0, edges[1], shares * z[edges[0]]))
        return self.head(x)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = GraphAttention()

    def forward(self, x: torch.Tensor, edges: torch.Tensor, labels: torch.Tensor) -> Any:
        return F.cross_entropy(self.model(x, edges), labels)


def batch(n: int = N_NODES) -> tuple[torch.Tensor, ...]:
    labels = torch.randint(0, N_CLASSES, (n,))
    return torch.randn(n, WIDTH), torch.randint(0, n, (2, 8 * n)), labels


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def train(model: nn.Module, given: Any, loss: Loss | None, *, n_steps: int = 1) -> None:
    for _ in range(n_steps):
        output = model(*given) if loss is None else model(*given[:2])
        (output if loss is None else loss(output, given)).backward()
        model.zero_grad(set_to_none=True)


def cross_entropy(output: torch.Tensor, given: Any) -> torch.Tensor:
    return F.cross_entropy(output, given[2])


STEPS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "inside": (WithLoss, {}),
    "outside": (GraphAttention, {"loss": cross_entropy, "inputs": lambda given: given[:2]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", STEPS)
def test_fit_quotes_what_solve_quotes_and_what_is_measured(where: str) -> None:
    torch.manual_seed(0)
    build, step = STEPS[where]
    model, given = build(), batch()
    solution = solve(model, given, budget="1GB", optimizer=sgd(model), **step)
    measured = measure(copy.deepcopy(model), given, n_steps=1, **step).peak_bytes
    fit(model, budget="1GB", optimizer=sgd(model))
    train(model, given, step.get("loss"))
    (plan,) = plans_of(model)
    found = plan.solution.baseline.peak_bytes
    assert found == pytest.approx(solution.baseline.peak_bytes, rel=WITHIN)
    assert found == pytest.approx(measured, rel=WITHIN)


@pytest.mark.slow
def test_a_plan_made_anew_by_apply_quotes_what_solve_quotes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = WithLoss()
    apply(model, solve(model, batch(), budget="1GB"), on_mismatch="replan")
    other = batch(N_NODES + 50)
    with caplog.at_level(logging.WARNING):
        train(model, other, None)
    expected = solve(remove(model), other, budget="1GB").baseline.peak_bytes
    assert f"peak {format_size(expected)} -> " in caplog.text


@pytest.mark.slow
def test_the_first_step_shows_what_the_loss_takes(caplog: pytest.LogCaptureFixture) -> None:
    """Before it, five outputs are reserved, without a plan as well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 500))
    x, labels = torch.randn(256, WIDTH), torch.randint(0, 500, (256,))
    loss: Loss = lambda output, given: F.cross_entropy(output, given[1])  # noqa: E731
    step: dict[str, Any] = {"loss": loss, "inputs": lambda given: given[0]}
    expected = solve(model, (x, labels), budget="1GB", **step).baseline.peak_bytes
    fit(model, budget="1GB", optimizer=sgd(model))
    with caplog.at_level(logging.INFO):
        loss(model(x), (x, labels)).backward()
    (plan,) = plans_of(model)
    assert plan.solution.baseline.peak_bytes == pytest.approx(expected, rel=WITHIN)
    assert "the loss takes" in caplog.text
    assert f"the peak without a plan is {format_size(plan.solution.baseline.peak_bytes)}" in (
        caplog.text
    )


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("holds", [True, False])
def test_outputs_that_the_training_drops_are_seen(holds: bool) -> None:
    """As the Trainer of Hugging Face does: it keeps the loss alone."""
    torch.manual_seed(0)
    model, given = LanguageModel(), (torch.randint(0, 2000, (4, 64)),)

    def step() -> None:
        output = model(*given)
        loss = output["loss"]
        if not holds:
            del output
        loss.backward()
        model.zero_grad(set_to_none=True)

    step()
    resident = sum(each.nbytes for each in (*model.parameters(), *given))
    measured = resident + cpu_peak_bytes(step).peak_bytes
    fit(model, budget="1GB", optimizer=sgd(model))
    step()
    (plan,) = plans_of(model)
    assert plan.solution.baseline.peak_bytes == pytest.approx(measured, rel=WITHIN)
    assert any("drops outputs" in note for note in plan.notes) is not holds


class LanguageModel(nn.Module):
    """The logits are its largest tensor; its loss keeps a copy of them for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2000, 32), nn.Linear(32, 2000)

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embedding(words)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), words.flatten()), "logits": logits}


def test_outputs_are_dropped_once_the_loss_outside_is_computed() -> None:
    """Before its backward pass, which has the peak."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 500))
    x, labels = torch.randn(256, WIDTH), torch.randint(0, 500, (256,))

    def loss_of(output: torch.Tensor, given: Any) -> torch.Tensor:
        return F.cross_entropy(output.double(), given[1])

    def step() -> None:
        output = model(x)
        loss = loss_of(output, (x, labels))
        del output
        loss.backward()
        model.zero_grad(set_to_none=True)

    step()
    resident = sum(each.nbytes for each in (*model.parameters(), x, labels))
    graph = trace(model, (x, labels), loss=loss_of, inputs=lambda given: given[0])
    held = simulate_unplanned(graph).peak_bytes
    dropped = simulate_unplanned(with_dropped_outputs(graph, graph.returned)).peak_bytes
    assert dropped == pytest.approx(resident + cpu_peak_bytes(step).peak_bytes, rel=WITHIN)
    assert held - dropped == 256 * 500 * 4
