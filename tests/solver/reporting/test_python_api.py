"""The command's outputs in Python, and what is said where something was given wrongly."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import solver
from checkpoint_solver.cli.command import main
from graphs.files import FormatError
from graphs.graph import Graph
from graphs.trace import TraceError, trace
from scheduler_runtime import PlanMismatchError, apply, measure, verify
from solver import IllegalScheduleError, Solution, draw, report, solve, sweep
from solver.reporting import rows
from solver.sizes_deadlines_progress.sizes import BudgetError
from tests.support.command import failed, write_model
from tests.support.paths import ROOT


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))


def make_batch() -> torch.Tensor:
    return torch.ones(512, 32)


def mean(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(scope="module")
def graph() -> Graph:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    return trace(model, make_batch(), loss=mean, optimizer=optimizer)


@pytest.fixture(scope="module")
def solution(graph: Graph) -> Solution:
    plain = solve(graph, budget="1GB")
    return solve(graph, budget=int(0.8 * plain.baseline.peak_bytes))


def test_the_report_is_the_commands(solution):
    out = io.StringIO()
    report(solution, file=out)
    text = out.getvalue()
    assert "Memory at the peak of the step" in text
    assert f"{solution.simulation.n_recomputed}" in text
    assert "lower bound" in text
    assert "roofline" in text
    assert "evaluation mode" not in text


@pytest.mark.slow
def test_a_model_in_evaluation_mode_is_noted(tmp_path, capsys):
    planned = solve(make_model().eval(), make_batch(), loss=mean, budget="1GB")
    out = io.StringIO()
    report(planned, file=out)
    assert "in evaluation mode" in out.getvalue()
    planned.graph.save(tmp_path / "graph.json")
    assert main(["--budget", "1GB", str(tmp_path / "graph.json")]) == 0
    assert "in evaluation mode" in capsys.readouterr().out
    path = write_model(tmp_path, ("return Net()", "return Net().eval()"))
    assert main(["--budget", "1GB", "--device", "cpu", path]) == 0
    assert "in evaluation mode" in capsys.readouterr().out


@pytest.mark.slow
def test_pictures_of_an_answer_and_of_a_curve(solution, tmp_path):
    draw(solution, tmp_path / "memory.svg")
    curve = sweep(solution, budgets=["1MB", solution.baseline.peak_bytes], time_limit_s=600)
    asked = {point.request.budget_bytes for point in curve.points}
    assert asked == {10**6, solution.baseline.peak_bytes, solution.request.budget_bytes}
    draw(curve, tmp_path / "curve.svg")
    draw(curve, tmp_path / "marked.svg", chosen=solution)
    pictures = [(tmp_path / name).read_text() for name in ("memory.svg", "curve.svg", "marked.svg")]
    assert all("<svg" in picture for picture in pictures)
    assert pictures[1] != pictures[2]


def test_points_keep_the_word_for_whoever_applies_one(solution):
    request = dataclasses.replace(solution.request, rewrites="bitwise")
    curve = sweep(dataclasses.replace(solution, request=request), budgets=["1MB"])
    assert {point.request.rewrites for point in curve.points} == {"bitwise"}


def test_one_budget_may_be_given_alone(graph):
    for budget in ("4GB", 4e9):
        (point,) = sweep(graph, budgets=budget, methods=["sqrt"]).points
        assert point.request.budget_bytes == 4 * 10**9


@pytest.mark.slow
def test_what_cannot_be_drawn_is_refused(graph, solution, tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        draw(solution, tmp_path / "memory.gif")
    with pytest.raises(ValueError, match="the status is infeasible; minimum budget found"):
        draw(solve(graph, budget=1000), tmp_path / "memory.png")
    with pytest.raises(TypeError, match="given an object of type Graph; it takes a Solution"):
        draw(graph, tmp_path / "memory.png")
    with pytest.raises(FileNotFoundError, match=r"not/there/a\.png: there is no folder"):
        draw(solution, tmp_path / "not" / "there" / "a.png")


@pytest.mark.parametrize(("less_bytes", "is_told"), [(1, False), (200_000_000, True)])
def test_early_frees_are_told_where_they_are_seen(less_bytes, is_told, solution, monkeypatch):
    eager_bytes = 356_600_000
    baseline = dataclasses.replace(solution.baseline, peak_bytes=eager_bytes)
    solution = dataclasses.replace(solution, baseline=baseline)
    monkeypatch.setattr(rows, "freed_early_bytes", lambda _: eager_bytes - less_bytes)
    assert bool(list(rows._early_free_rows(solution))) == is_told


def test_a_plan_is_verified(solution):
    found = verify(solution, model=make_model, batch=make_batch, loss=mean)
    assert found.differences == ()
    assert found.predicted_peak_bytes == solution.simulation.peak_bytes
    assert found.measured_peak_bytes < found.baseline_measured_peak_bytes
    assert found.n_gradients == 8
    with pytest.raises(TypeError, match=r"model=lambda: \.\.\."):
        verify(solution, model=make_model(), batch=make_batch)


def test_another_batch_than_the_planned_one_is_not_verified(solution) -> None:
    with pytest.raises(PlanMismatchError, match="planned for"):
        verify(solution, model=make_model, batch=lambda: make_batch()[:2], loss=mean)


def test_a_batch_that_the_model_does_not_take_is_told(solution) -> None:
    def with_targets() -> dict[str, torch.Tensor]:
        return {"rows": make_batch(), "targets": torch.ones(512)}

    with pytest.raises(TraceError, match=r"inputs=lambda batch: batch\[0\]"):
        verify(solution, model=make_model, batch=with_targets, loss=mean)
    with pytest.raises(TraceError, match=r"inputs=lambda batch: batch\[0\]"):
        measure(make_model(), with_targets(), loss=mean)


def test_the_report_in_python_names_what_writes_the_schedule_there(solution) -> None:
    out = io.StringIO()
    report(solution, file=out)
    assert 'solution.save("schedule.json")' in out.getvalue()
    assert "-o schedule.json" not in out.getvalue()


def test_an_answer_without_a_plan_says_what_is_in_the_way(graph):
    solution = solve(graph, budget=graph.resident_bytes)
    words = repr(solution)
    assert "infeasible" in words
    assert "minimum budget found: " in words
    assert ", proven to be the least" in words
    less = dataclasses.replace(solution.obstacle, proven_bytes=solution.obstacle.proven_bytes - 1)
    assert ", proven: at least " in repr(dataclasses.replace(solution, obstacle=less))
    assert "bottleneck op: " in words
    reserved = solve(graph, budget=graph.resident_bytes, reserve=1000)
    assert "reserve included" in repr(reserved)


def test_applying_an_answer_without_a_plan_says_what_is_in_the_way(graph) -> None:
    nothing = solve(graph, budget=graph.resident_bytes)
    with pytest.raises(ValueError, match=r"no schedule to apply: .*minimum budget found: "):
        apply(make_model(), nothing)


def test_a_share_of_the_memory_is_a_number_of_bytes(graph):
    budget = 0.85 * (10**9 + 1)
    assert solve(graph, budget=budget, reserve=0.05 * 10**6).request.reserve_bytes == 50_000
    assert solve(graph, budget=budget).request.budget_bytes == 850_000_000
    curve = sweep(graph, budgets=[budget])
    assert [point.request.budget_bytes for point in curve.points] == [850_000_000]


@pytest.mark.parametrize("budget", [0.85, "16gigs", float("nan")])
def test_what_is_no_size_is_refused_before_the_model_is_traced(budget):
    class Untraced(nn.Module):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    with pytest.raises(BudgetError, match="invalid budget"):
        solve(Untraced(), make_batch(), budget=budget)


def test_a_schedule_of_another_graph_is_told(solution, tmp_path):
    solution.save(tmp_path / "schedule.json")
    other = trace(make_model(), torch.ones(256, 32), loss=mean)
    with pytest.raises(IllegalScheduleError, match="or plan again") as raised:
        Solution.load(tmp_path / "schedule.json", graph=other)
    assert "schedule.json: the schedule was made for another graph" in str(raised.value)
    assert "illegal" not in str(raised.value)


def test_what_is_no_graph_is_told():
    with pytest.raises(FormatError, match=r"solve --budget SIZE hybrid\.py"):
        solve("hybrid.py", budget="1GB")
    with pytest.raises(FileNotFoundError, match="no such file; give a graph file"):
        solve("none.json", budget="1GB")
    with pytest.raises(TypeError, match="a batch is missing"):
        solve(make_model(), budget="1GB")


@pytest.mark.slow
def test_a_module_of_the_working_directory_is_taken(tmp_path, capsys):
    write_model(tmp_path, name="hybrid_of_two.py")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "checkpoint_solver",
            "--budget",
            "1GB",
            "hybrid_of_two:get_model",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "hybrid_of_two:get_model (Net)" in done.stdout


def test_a_file_without_its_ending_is_guessed(tmp_path, capsys, monkeypatch):
    write_model(tmp_path, name="hybrid.py")
    monkeypatch.chdir(tmp_path)
    assert "did you mean hybrid.py?" in failed(capsys, "--budget", "1GB", "hybrid", code=4)


def test_all_that_is_offered_is_there():
    assert all(callable(getattr(solver, name)) for name in solver.__all__)


@pytest.mark.parametrize("wrong", [None, nn.Linear(1, 1), "schedule.json"])
def test_report_says_what_it_takes(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"report\(\) was given .*; it takes the Solution"):
        report(wrong)


def test_a_bare_number_that_was_meant_in_gigabytes(graph: Graph, capsys, tmp_path) -> None:
    with pytest.raises(
        BudgetError, match=r"invalid budget '16': 16 bytes, .*; write 16GB for gigabytes"
    ):
        solve(graph, budget="16")
    assert solve(graph, budget=16).schedule is None  # a number of bytes, and what it means
    path = tmp_path / "graph.json"
    graph.save(path)
    assert main(["--budget", "16", str(path)]) == 2
    assert "write 16GB for gigabytes" in capsys.readouterr().err
    assert main(["--budget", "2000000", "--quiet", str(path)]) == 0


def test_the_package_is_the_command_too() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "checkpoint_solver", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith("solve ")


def test_draw_and_sweep_say_what_they_take_instead(solution, tmp_path):
    with pytest.raises(TypeError, match=r"object of type Solution as the file's name; write draw"):
        draw(tmp_path / "plan.png", solution)
    with pytest.raises(TypeError, match=r"object of type Graph; it takes a Solution .*, a Curve"):
        draw(solution.graph, tmp_path / "plan.png")
    with pytest.raises(TypeError, match=r"object of type Sequential; it takes the Solution that"):
        sweep(make_model(), budgets=["1GB"])
