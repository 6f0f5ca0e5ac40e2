"""A batch that is the planned one but smaller does not end a training, and stays in its budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler_runtime import PlanMismatchError, apply, measure
from solver import solve
from solver.schedule import Solution
from tests.support.bitwise import assert_equal
from tests.support.models import Classifier, TiedLanguageModel


def rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 5


def tight_plan(model: Classifier) -> Solution:
    """For 256 rows, in a budget that needs recomputation."""
    plain = solve(model, rows(256), budget="1GB", loss=Classifier.loss)
    budget = 7 * plain.baseline.peak_bytes // 10
    solution = solve(model, rows(256), budget=budget, loss=Classifier.loss)
    assert solution.simulation.n_recomputed > 0
    return solution


def epoch(model: Any, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Losses, and the parameters after steps with batches of these sizes."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for n in sizes:
        optimizer.zero_grad()
        loss = Classifier.loss(model(*rows(n)), rows(n))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("from_file", [False, True])
def test_a_short_last_batch_is_planned_within_the_budget(
    from_file: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Classifier()
    planned = copy.deepcopy(plain)
    solution = tight_plan(plain)
    solution.save(path := tmp_path / "schedule.json")
    apply(planned, path if from_file else solution)
    expected, got = epoch(plain, (256, 256, 241, 1)), epoch(planned, (256, 256, 241, 1))
    assert_equal(expected, got)
    assert "argument x (and 1 more) has shape [241, 8], planned for [256, 8]" in caplog.text
    for n in (256, 241, 1):
        measured = measure(planned, rows(n), loss=Classifier.loss)
        assert measured.peak_bytes <= solution.request.budget_bytes


@pytest.mark.slow
def test_it_is_refused_where_that_is_asked_for() -> None:
    model = Classifier()
    apply(model, tight_plan(model), on_mismatch="error")
    with pytest.raises(PlanMismatchError, match=r"has shape \[241, 8\], planned for \[256, 8\]"):
        epoch(model, (256, 241))


@pytest.mark.slow
def test_what_is_larger_or_differs_otherwise_is_refused() -> None:
    model, tokens = TiedLanguageModel(), TiedLanguageModel.batch()
    apply(model, solve(model, tokens, budget="1GB"))
    model(tokens[:, :4])
    fewer_but_longer = torch.cat([tokens, tokens], dim=1)[:1]
    for other in (tokens.repeat(2, 1), fewer_but_longer, tokens[:1].int()):
        with pytest.raises(PlanMismatchError, match=r"has (shape|dtype)"):
            model(other)


@pytest.mark.slow
def test_a_smaller_batch_of_another_model_is_refused() -> None:
    tokens = TiedLanguageModel.batch()
    other = apply(TiedLanguageModel(n_layers=3), solve(TiedLanguageModel(), tokens, budget="1GB"))
    with pytest.raises(PlanMismatchError):
        other(tokens[:1])


@pytest.mark.slow
def test_of_several_plans_the_one_that_it_is_smaller_than_counts() -> None:
    model, tokens = TiedLanguageModel(), TiedLanguageModel.batch()
    plans = [solve(model, tokens[:n], budget="1GB") for n in (1, 3)]
    apply(model, plans)
    model(tokens[:2]).backward()


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="on_mismatch is 'larger'; one of smaller, replan, error"):
        apply(Classifier(), "schedule.json", on_mismatch="larger")
