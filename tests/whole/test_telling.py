"""Each entry point that takes seconds tells what runs and what came out; the command does not."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from checkpoint_solver.cli.command import main
from scheduler_runtime import apply, compile, fit, verify
from scheduler_runtime.fallback import plan_chain
from solver import Solution, solve, sweep
from solver.schedule import plan_line
from solver.sizes_deadlines_progress.progress_in_python import logger
from tests.support.command import without_progress, write_model


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has not configured logging; pytest has."""
    monkeypatch.setattr(logger, "hasHandlers", lambda: False)
    monkeypatch.delenv("RANK", raising=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in "1234"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def batch() -> torch.Tensor:
    return torch.ones(512, 32)


@pytest.fixture
def solution(capsys) -> Solution:
    plain = solve(Net(), batch(), budget="1GB")
    found = solve(Net(), batch(), budget=int(0.8 * plain.baseline.peak_bytes))
    capsys.readouterr()
    return found


def ends(told: str) -> tuple[str, str]:
    """The first line and the last; a slow machine tells between them how far it is."""
    first, *_, last = told.splitlines()
    assert first != last
    return first, last


PLANNED = r"Net: peak .* KB -> .* KB, time \+.* % \(bound \+.* %\), planned in .*s"


def test_solve(capsys):
    solve(Net(), batch(), budget="1GB")
    printed = capsys.readouterr()
    start, end = ends(printed.err)
    assert start == "tracing Net..."
    assert re.fullmatch(f"{PLANNED}; no optimizer is counted", end)
    assert printed.out == ""


@pytest.mark.slow
def test_solve_with_a_budget_that_nothing_fits(capsys):
    found = solve(Net(), batch(), budget=20_000)
    start, end = ends(capsys.readouterr().err)
    assert start == "tracing Net..."
    assert end.startswith("Net: nothing fits 20.00 KB (infeasible); minimum budget found: ")
    assert found.schedule is None


@pytest.mark.slow
def test_solve_with_a_graph_file(solution, tmp_path, capsys):
    solution.graph.save(tmp_path / "net.json")
    solve(tmp_path / "net.json", budget="1GB")
    start, end = ends(capsys.readouterr().err)
    assert start == "planning net.json..."
    assert end.startswith("net.json: peak ")


@pytest.mark.slow
def test_the_phrase_for_a_plan(solution):
    line = plan_line(solution, how="planned from an earlier plan", took_s=4.2)
    assert line.endswith(", planned from an earlier plan in 4.20 s")
    assert "time limit" not in line
    stopped = plan_line(
        replace(solution, timed_out=True, request=replace(solution.request, time_limit_s=3.0))
    )
    assert stopped.endswith(
        "; the search stopped at its share of the time limit of 3.00 s, so a faster plan may exist"
    )


@pytest.mark.slow
def test_the_phrase_says_that_a_plan_takes_more_than_the_step_without_it(solution):
    assert "more than without" not in plan_line(solution)
    larger = replace(solution.simulation, peak_bytes=solution.baseline.peak_bytes + 1)
    line = plan_line(replace(solution, simulation=larger))
    assert " (more than without a plan, but within the budget), time" in line


@pytest.mark.slow
def test_the_phrase_says_what_is_on_the_host_and_the_disk(solution):
    beside = replace(solution.simulation, host_peak_bytes=2_000_000, disk_peak_bytes=3_000_000)
    line = plan_line(replace(solution, simulation=beside))
    assert " and 2.00 MB on the host and 3.00 MB on the disk, time " in line


@pytest.mark.slow
def test_sweep(solution, capsys):
    curve = sweep(solution, budgets=["1MB", "2MB"])
    start, end = ends(capsys.readouterr().err)
    assert start == "sweeping budgets of Net..."
    assert re.fullmatch(r"Net: 3 plans for 3 budgets in .*s", end)
    assert len(curve.points) == 3


@pytest.mark.slow
def test_verify(solution, capsys):
    """With the optimizer that the plan counts: here none."""
    found = verify(solution, model=Net, batch=batch)
    assert found.passed
    assert found.warnings == ()
    start, end = ends(capsys.readouterr().err)
    assert start == "verifying the plan of Net..."
    assert re.match(r"Net: verification .*bitwise identical; peak .* \(predicted .*\)$", end)


@pytest.mark.slow
def test_the_first_step_with_a_plan(solution, tmp_path, capsys):
    solution.save(tmp_path / "schedule.json")
    model = apply(Net(), tmp_path / "schedule.json")
    assert capsys.readouterr().err == ""
    model(batch()).backward()
    start, end = ends(capsys.readouterr().err)
    assert start == "tracing Net..."
    assert re.fullmatch(r"Net: the traced step matches the plan \(.*s\)", end)
    model(batch()).backward()
    assert capsys.readouterr().err == ""


def test_the_first_step_of_fit(capsys):
    model = Net()
    fit(model, budget="1GB", optimizer=torch.optim.SGD(model.parameters()))
    assert capsys.readouterr().err == ""
    model(batch()).backward()
    assert capsys.readouterr().err.splitlines()[0] == "tracing Net..."
    model.zero_grad()
    model(batch()).backward()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_compile(capsys):
    compile(Net(), batch(), budget="1GB", backend="aot_eager")
    start, end = ends(capsys.readouterr().err)
    assert start.startswith("compiling Net, attempt 1 of at most 5, PyTorch's partition")
    assert re.fullmatch(r"Net: compiled by aot_eager within 1.00 GB: .*\(1 attempt, .*s\)", end)


def test_planning_by_submodules(capsys):
    model = nn.Sequential(*Net().layers)
    plan_chain(model, batch(), loss=lambda output, _batch: output.mean(), budget="1GB")
    start, end = ends(capsys.readouterr().err)
    assert start == "measuring steps of Sequential..."
    assert re.match(r"Sequential: peak .*, planned by submodules in .*s", end)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["--json", "--quiet"])
def test_the_command_tells_nothing_twice(output, tmp_path, capsys):
    code = main(["--budget", "1MB", "--device", "cpu", "--verify", output, write_model(tmp_path)])
    printed = capsys.readouterr()
    err = without_progress(printed.err)
    assert "tracing" not in err
    assert "Net: " not in err
    if output == "--json":
        assert json.loads(printed.out)["exit_code"] == code
