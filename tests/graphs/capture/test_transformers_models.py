"""Models of the transformers library, which return their loss as `output.loss`."""

from __future__ import annotations

import copy

import pytest
import torch

from graphs.trace import TraceError, trace
from scheduler_runtime import apply, remove
from solver import solve
from solver.reporting.report_data import step_notes
from tests.support.bitwise import assert_equal
from tests.support.tiny_transformers import tiny_gpt2


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(8 * 64).reshape(8, 64) % 100
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.slow
def test_a_loss_function_that_picks_the_loss_makes_the_same_plan() -> None:
    model = tiny_gpt2()
    plain = trace(model, batch())
    picked = trace(model, batch(), loss=lambda output, _: output.loss)
    assert picked.graph_id == plain.graph_id
    assert picked.meta.environment == plain.meta.environment


@pytest.mark.slow
def test_a_plan_runs_with_the_same_bits() -> None:
    model = tiny_gpt2()
    options = {"loss": lambda output, _: output.loss}
    peak_bytes = solve(model, batch(), budget="1GB", **options).baseline.peak_bytes
    solution = solve(model, batch(), budget=int(0.8 * peak_bytes), **options)
    assert solution.simulation.n_recomputed > 0
    planned = apply(copy.deepcopy(model), solution)
    results = []
    for each in (model, planned):
        torch.manual_seed(1)
        output = each(**batch())
        output.loss.backward()
        results.append([output.loss.detach(), *(p.grad for p in each.parameters())])
    assert_equal(*results)


@pytest.mark.slow
def test_the_cache_for_generation_is_off_in_planned_steps_only() -> None:
    model = tiny_gpt2()
    assert model.config.use_cache
    solution = solve(model, batch(), budget="1GB")
    assert any("config.use_cache is on" in note for note in step_notes(solution.graph))
    apply(model, solution)
    assert model(**batch()).past_key_values is None
    assert model.config.use_cache
    assert model.eval()(**batch()).past_key_values is not None
    model.config.use_cache = False
    assert not trace(remove(model).train(), batch()).meta.no_cache


def test_a_cache_that_is_asked_for_is_refused() -> None:
    with pytest.raises(TraceError, match="pass use_cache=False"):
        trace(tiny_gpt2(), {**batch(), "use_cache": True})
