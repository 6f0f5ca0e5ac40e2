"""A plan that was saved with its graph and loaded again: what it says, and what it can still do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs.graph import Graph
from graphs.rewrites import chunk_sizes
from graphs.trace import trace
from scheduler_runtime import PlanMismatchError, apply
from scheduler_runtime.export import ExportError, to_torch_checkpoint
from solver import solve
from solver.methods import METHODS, find_obstacle
from solver.reporting.report_data import rewritten, step_notes
from solver.schedule import Solution
from solver.schedule.simulation import OtherGraphError
from solver.solving import NoPlainStepError, for_stock_modules
from tests.support.command import failed
from tests.support.models import LanguageHead


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sizes, "LEAST_ELEMENTS", 1)


BATCH = torch.randn(512, 8), torch.randint(0, 1024, (512,))


def reloaded(solution: Solution, folder: Path) -> Solution:
    solution.save(folder / "schedule.json")
    solution.graph.save(folder / "graph.json")
    return Solution.load(folder / "schedule.json", graph=folder / "graph.json")


def chunked_plan(model: nn.Module) -> Solution:
    graph = trace(model, BATCH, rewrites=("in_place",))
    least_bytes = find_obstacle(graph, method=METHODS["auto"]).proven_bytes
    solution = solve(model, BATCH, budget=least_bytes - 1)
    assert len(solution.graph.meta.rewrites) == 2
    return solution


@pytest.mark.slow
def test_a_chunked_plan_keeps_the_baseline_of_the_plain_step(tmp_path: Path) -> None:
    planned = chunked_plan(LanguageHead())
    loaded = reloaded(planned, tmp_path)
    assert loaded.baseline.peak_bytes == planned.baseline.peak_bytes
    assert loaded.baseline.time_s == planned.baseline.time_s
    for name in ("overhead", "lower_bound_overhead", "gap", "status"):
        assert getattr(loaded, name) == getattr(planned, name)
    changed = rewritten(planned)
    assert rewritten(loaded) == dataclasses.replace(
        changed, saved_bytes=(), overheads=()
    )  # one graph is known


@pytest.mark.slow
@pytest.mark.parametrize("with_graph", [True, False])
def test_a_plan_whose_rewrite_the_step_does_not_allow_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_graph: bool
) -> None:
    """Here the chunks became longer than the batch; it might be another version or loss."""
    reloaded(chunked_plan(LanguageHead()), tmp_path)
    path = tmp_path / "schedule.json"
    plan = Solution.load(path, graph=tmp_path / "graph.json") if with_graph else path
    monkeypatch.setattr(chunk_sizes, "LEAST_ELEMENTS", 2**20)
    model = LanguageHead()
    apply(model, plan)
    with pytest.raises(PlanMismatchError, match=r"made with chunked_loss.* no loss that can be"):
        model(*BATCH)


def test_a_rewrite_of_another_version_is_named(tmp_path: Path) -> None:
    solve(LanguageHead(), BATCH, budget="1GB").save(path := tmp_path / "schedule.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rewrites": ["fused_norms"]}))
    with pytest.raises(ValueError, match="the rewrite 'fused_norms', which this version does not"):
        apply(LanguageHead(), path)


@pytest.mark.slow
def test_a_schedule_is_not_taken_for_a_graph_without_its_rewrites(tmp_path: Path) -> None:
    reloaded(chunked_plan(LanguageHead()), tmp_path)
    trace(LanguageHead(), BATCH).save(path := tmp_path / "plain.json")
    with pytest.raises(OtherGraphError, match="give the graph that was saved with it"):
        Solution.load(tmp_path / "schedule.json", graph=path)


@pytest.mark.slow
def test_a_chunked_plan_is_not_exported_as_another_program(tmp_path: Path) -> None:
    model = LanguageHead()
    loaded = reloaded(chunked_plan(model), tmp_path)
    with pytest.raises(NoPlainStepError, match=r"made with chunked_loss.* rewrites=\"none\""):
        next(for_stock_modules(loaded))
    with pytest.raises(ExportError, match="the plain step, which PyTorch runs, is not in the file"):
        to_torch_checkpoint(model, loaded)


def test_the_plain_step_of_a_plan_in_place_is_known_again(tmp_path: Path) -> None:
    graph = trace(LanguageHead(), BATCH, rewrites=("in_place",))
    solution = reloaded(solve(graph, budget="1GB"), tmp_path)
    assert solution.graph.meta.rewrites == ["in_place"]
    assert next(for_stock_modules(solution)).graph.meta.rewrites == []


def test_a_report_says_that_a_graph_is_not_the_plain_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(LanguageHead(), BATCH, rewrites=("chunked_loss", "in_place")).save(
        path := tmp_path / "g.json"
    )
    line = failed(capsys, "--budget", "1GB", "--emit", "deepspeed", str(path), code=2)
    assert "--emit deepspeed: the graph was made with chunked_loss" in line
    assert any("does not contain the plain step" in note for note in step_notes(Graph.load(path)))
    plain = trace(LanguageHead(), BATCH, rewrites=("in_place",))
    assert not any("plain step" in note for note in step_notes(plain))
