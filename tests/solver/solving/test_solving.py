"""The front door from Python: what it refuses, what it says, and how its answers print."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphs.trace import TraceError, trace
from scheduler_runtime import apply
from scheduler_runtime.measuring import measure
from solver import solve
from solver.methods.auto_method import auto
from solver.methods.least_budget import find_obstacle
from solver.methods.proposal import Method, Proposal
from solver.methods.registry import METHODS
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import deadline
from tests.support.bitwise import assert_equal
from tests.support.budgets import baseline_peak_bytes
from tests.support.synthetic_graphs import dense, pyramid, residual, u_shape

NETS = {
    "residual": residual(n_blocks=6),
    "u_shape": u_shape(depth=4),
    "pyramid": pyramid(n_blocks=(2, 2, 2, 2)),
    "dense": dense(n_layers=10),
}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def supervised() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], dict]:
    torch.manual_seed(0)
    batch = (torch.randn(256, 16), torch.randint(4, (256,)))
    options = {
        "loss": lambda output, batch: functional.cross_entropy(output, batch[1]),
        "inputs": lambda batch: batch[0],
    }
    return Classifier(), batch, options


@pytest.mark.slow
def test_targets_beside_the_models_inputs() -> None:
    model, batch, options = supervised()
    peak_bytes = solve(model, batch, budget="1GB", **options).baseline.peak_bytes
    solution = solve(model, batch, budget=int(0.85 * peak_bytes), **options)
    assert solution.simulation.n_recomputed > 0

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        options["loss"](model(batch[0]), batch).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    before = gradients()
    apply(model, solution)
    assert_equal(before, gradients())
    measured = measure(model, batch, **options)
    assert measured.peak_bytes == pytest.approx(solution.simulation.peak_bytes, abs=2**20)


def test_a_batch_that_forward_does_not_take_is_told_how() -> None:
    model, batch, options = supervised()
    with pytest.raises(TraceError, match=r"inputs=lambda batch: batch\[0\]"):
        trace(model, batch, loss=options["loss"])


@pytest.mark.slow
def test_a_loss_that_picks_what_the_model_computed_is_inside() -> None:
    class Both(Classifier):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layers(x)
            return {"logits": logits, "loss": functional.cross_entropy(logits, y)}

    model, batch, _ = supervised()
    model = Both()
    plain = trace(model, batch)
    assert trace(model, batch, loss=lambda output, _: output["loss"]).graph_id == plain.graph_id
    other = trace(model, batch, loss=lambda output, _: output["logits"].square().mean())
    assert any(node.phase == "outside" for node in other.nodes)


def test_a_misspelt_argument_is_solves_and_names_the_nearest() -> None:
    model, batch, _ = supervised()
    with pytest.raises(TypeError, match=r"solve\(\) takes no argument 'optimiser'.*'optimizer'"):
        solve(model, batch, budget="1GB", optimiser=None)


@pytest.mark.parametrize("path", ["nowhere.json", "."])
def test_a_schedule_file_that_is_not_there(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"solve -o schedule\.json"):
        apply(Classifier(), path)


def test_what_is_printed_is_short() -> None:
    graph = NETS["u_shape"]
    solution = solve(graph, budget=int(0.9 * baseline_peak_bytes(graph)))
    for value in (solution, graph, solution.schedule, solution.simulation, find_obstacle(graph)):
        assert len(repr(value)) < 3000
    assert "overhead" in repr(solution)
    assert solution.trace is solution.simulation  # its former name
    assert len(repr(solution)) < 300


@pytest.mark.slow
def test_planning_anew_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.square().mean()

    model = Net()
    solution = solve(model, torch.randn(8, 16), budget="1GB")
    apply(model, solution, on_mismatch="replan")
    with caplog.at_level(logging.WARNING):
        model(torch.randn(4, 16)).backward()
    assert "has shape [4, 16], planned for [8, 16]" in caplog.text


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("name", NETS)
def test_the_least_budget_that_is_named_is_solved(name: str) -> None:
    graph = NETS[name]
    obstacle = find_obstacle(graph)
    assert obstacle.proven_bytes <= obstacle.reached_bytes == find_obstacle(graph).reached_bytes
    assert simulate(graph, obstacle.schedule).peak_bytes == obstacle.reached_bytes
    found = auto(graph, budget_bytes=obstacle.reached_bytes, time_limit_s=600, seed=0)
    assert simulate(graph, found.schedule).peak_bytes <= obstacle.reached_bytes
    less = auto(graph, budget_bytes=obstacle.proven_bytes - 1, time_limit_s=600, seed=0)
    assert less.schedule is None
    assert less.lower_bound_s == float("inf")


@pytest.mark.slow
def test_a_search_that_the_clock_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = NETS["pyramid"]
    least_bytes = find_obstacle(graph).reached_bytes
    peak_bytes = baseline_peak_bytes(graph)
    budget_bytes = least_bytes + (peak_bytes - least_bytes) // 10
    assert not solve(graph, budget=peak_bytes).timed_out
    looks = itertools.count()
    monkeypatch.setattr(deadline, "now_s", lambda: float(next(looks)))
    assert solve(graph, budget=budget_bytes, time_limit_s=20).timed_out


@pytest.mark.slow
def test_a_budget_below_the_proof_is_explained() -> None:
    graph = NETS["pyramid"]
    least_bytes = find_obstacle(graph).proven_bytes
    solution = solve(graph, budget=least_bytes - 1)
    assert solution.status == "infeasible"
    assert solution.obstacle.reached_bytes >= least_bytes


@pytest.mark.slow
def test_a_search_that_ran_out_of_time_answers_with_the_least_schedule_where_it_fits(monkeypatch):
    def hurried(graph, **options):
        return Proposal(None, timed_out=True)

    monkeypatch.setitem(METHODS, "auto", Method(hurried, reaches_least_budget=True))
    graph = residual(n_blocks=30)
    least = find_obstacle(graph)
    budget_bytes = (least.reached_bytes + baseline_peak_bytes(graph)) // 2
    found = solve(graph, budget=budget_bytes)
    assert found.simulation.peak_bytes <= budget_bytes
    assert found.status == "feasible"
    assert found.timed_out


@pytest.mark.parametrize("wrong", ["illegal", "above the budget"])
def test_a_proposal_that_the_simulator_refuses_is_dropped(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    graph = residual(n_blocks=3)
    plain = baseline(graph)
    budget_bytes = simulate(graph, plain).peak_bytes - 1
    schedule = replace(plain, ops=plain.ops[1:]) if wrong == "illegal" else plain
    proposal = Proposal(schedule, lower_bound_s=graph.baseline_time_s)
    monkeypatch.setitem(METHODS, "mine", Method(lambda graph, **options: proposal))
    with pytest.warns(UserWarning, match="mine proposed an invalid schedule, which was ignored"):
        solution = solve(graph, budget=budget_bytes, method="mine")
    assert solution.status == "infeasible"
    assert solution.schedule is None
    assert solution.obstacle is not None
