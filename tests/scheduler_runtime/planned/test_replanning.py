"""A call that differs is planned with all that the request of the first plan allows."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs.rewrites import chunk_sizes, probe
from graphs.trace import trace
from scheduler_runtime import PlanMismatchError, apply, remove
from scheduler_runtime.planned import ReplanError
from solver import solve
from solver.methods import METHODS, find_obstacle
from solver.schedule import SavedSchedule, Solution
from tests.support.models import LanguageHead


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_sizes, "LEAST_ELEMENTS", 1)


def batch(n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(n_rows)
    return torch.randn(n_rows, 8), torch.randint(0, 1024, (n_rows,))


def small_plan(model: nn.Module, word: str) -> Solution:
    """For 128 rows, within a budget in which 512 fit with rewrites only."""
    graph = trace(model, batch(512))
    least_bytes = find_obstacle(graph, method=METHODS["auto"]).proven_bytes
    solution = solve(model, batch(128), budget=least_bytes - 1, rewrites=word)
    assert solution.graph.meta.rewrites == []
    return solution


@pytest.mark.slow
@pytest.mark.parametrize("from_file", [False, True])
def test_variants_that_the_first_plan_does_without_are_planned(
    tmp_path: Path, from_file: bool
) -> None:
    model = LanguageHead()
    plain, solution = copy.deepcopy(model), small_plan(model, "bitwise")
    solution.save(path := tmp_path / "schedule.json")
    apply(model, path if from_file else solution, on_mismatch="replan")
    for n_rows in (512, 128):
        for each in (model, plain):
            each.zero_grad()
            each(*batch(n_rows)).backward()
        assert torch.equal(model.head.weight.grad, plain.head.weight.grad)


def test_none_stays_none(tmp_path: Path) -> None:
    model = LanguageHead()
    solution = small_plan(model, "none")
    solution.save(path := tmp_path / "schedule.json")
    assert SavedSchedule.load(path).request == solution.request
    apply(model, path, on_mismatch="replan")
    with pytest.raises(ReplanError, match="no schedule for it fits"):
        model(*batch(512))


@pytest.mark.slow
def test_a_graph_is_replanned_with_the_rewrites_it_was_made_with() -> None:
    model = LanguageHead()
    budget = small_plan(model, "none").request.budget_bytes
    graph = trace(model, batch(128), rewrites=("chunked_loss", "in_place"))
    solution = solve(graph, budget=budget)
    assert solution.request.rewrites == "none"
    apply(model, solution, on_mismatch="replan")
    model(*batch(512)).backward()


def test_an_unknown_word_is_refused() -> None:
    request = solve(trace(LanguageHead(), batch(128)), budget="1GB").request
    with pytest.raises(ValueError, match="rewrites is 'bits'"):
        dataclasses.replace(request, rewrites="bits")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_plan_in_row_chunks_is_tried_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Also one for a device that is not here, for which planning tries nothing."""
    model = LanguageHead()
    plain = copy.deepcopy(model)
    graph = trace(model, batch(512), rewrites=("chunked_loss", "in_place"))
    solve(graph, budget="1GB").save(path := tmp_path / "schedule.json")
    if device != "cpu":
        saved = json.loads(path.read_text())
        saved["environment"]["costs"] = {"model": "roofline", "device": device}
        path.write_text(json.dumps(saved))
    monkeypatch.setattr(probe, "_same_in_chunks", lambda *form: False)
    apply(model, path)
    with pytest.raises(PlanMismatchError, match="made with chunked_loss, and on this device"):
        model(*batch(512))
    remove(model)
    apply(model, path, on_mismatch="replan")
    for each in (model, plain):
        each(*batch(512)).backward()
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)
