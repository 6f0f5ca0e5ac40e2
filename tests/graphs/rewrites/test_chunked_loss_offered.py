"""Where a loss in row chunks is offered, noted and planned."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from graphs.costs import cpu_peak_bytes
from graphs.rewrites import probe
from graphs.rewrites.probe import keeps_bits
from graphs.rewrites.row_chunks import RowChunks
from graphs.trace import trace, trace_variants
from scheduler_runtime import apply
from solver import solve
from solver.methods import METHODS, find_obstacle
from tests.graphs.rewrites.test_chunked_loss import BOTH, LOSSES, small_chunks
from tests.support.bitwise import assert_equal
from tests.support.budgets import baseline_peak_bytes
from tests.support.wide_logits import N_ROWS, Head, batch, captured, results

__all__ = ["small_chunks"]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("rewrite", BOTH)
def test_it_is_offered_only_where_chunks_change_no_bit(monkeypatch, rewrite) -> None:
    model, (x, y) = Head(LOSSES["smoothed"]), batch()
    step, _ = captured(model, x, y, (rewrite,))
    assert keeps_bits(step.captured.graph, {})
    for node in step.captured.graph.nodes:
        if isinstance(node.target, RowChunks):
            node.target = depends_on_the_chunk(node.target)
    assert not keeps_bits(step.captured.graph, {})


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("loss", ["preferences", "a mask of classes", "several classes of a row"])
def test_losses_by_hand_are_tried_and_offered(loss) -> None:
    """Among what they read by row are classes, and masks of all classes."""
    model, (x, y) = Head(LOSSES[loss]), batch()
    rewrites = [tuple(graph.meta.rewrites) for graph in trace_variants(model, (x, y)).planned]
    assert rewrites[-2:] == [("chunked_loss_backward", "in_place"), ("chunked_loss", "in_place")]


def depends_on_the_chunk(chunks: RowChunks) -> RowChunks:
    def body(out: torch.Tensor, *others: torch.Tensor) -> None:
        chunks.body(out, *others)
        out.add_(out.sum())

    return dataclasses.replace(chunks, title="sum", body=body)


@pytest.mark.slow
def test_a_refused_rewrite_is_noted_and_not_planned(monkeypatch) -> None:
    model, (x, y) = Head(LOSSES["mean"]), batch()
    assert len(trace_variants(model, (x, y)).planned) == 4
    monkeypatch.setattr(probe, "_same_in_chunks", lambda *form: False)
    step = trace_variants(model, (x, y))
    assert [graph.meta.rewrites for graph in step.planned] == [[], ["in_place"]]
    assert any("row chunks" in note for note in step.plain.meta.notes)


@pytest.mark.slow
def test_the_loss_is_tried_as_it_runs_and_only_where_a_column_is_picked(monkeypatch) -> None:
    tried = []
    monkeypatch.setattr(probe, "_same_loss_of_column", lambda *form: tried.append(form[:3]))
    for dtype in (torch.float32, torch.bfloat16):
        for loss in ("sum", "smoothed"):
            model, (x, y) = Head(LOSSES[loss]).to(dtype), batch()
            step = trace_variants(model, (x.to(dtype), y))
            assert [graph.meta.rewrites for graph in step.planned][2:] == [
                ["chunked_loss_backward", "in_place"]
            ]
            assert step.plain.meta.refused_rewrites == ["chunked_loss"]
        assert tried == [(N_ROWS, dtype, 2), (N_ROWS, dtype, 1)]
        tried.clear()


@pytest.mark.slow
def test_the_best_variant_is_taken_and_runs_with_the_same_bits() -> None:
    """Within a budget that the plain step cannot meet."""
    model, (x, y) = Head(LOSSES["mean"], 4096), batch(4096)
    least_bytes = find_obstacle(trace(model, (x, y)), method=METHODS["auto"]).proven_bytes
    solution = solve(model, (x, y), budget=least_bytes - 1)
    assert solution.graph.meta.rewrites
    assert solution.baseline.peak_bytes == baseline_peak_bytes(solution.plain)
    assert solution.lower_bound_s <= solution.simulation.time_s
    expected = results(model, lambda: model(x, y))
    apply(model, solution)
    assert_equal(results(model, lambda: model(x, y)), expected)
    model.zero_grad()  # as below
    gc.collect()
    peak_bytes = cpu_peak_bytes(lambda: results(model, lambda: model(x, y))).peak_bytes
    assert peak_bytes == pytest.approx(
        solution.simulation.peak_bytes - solution.graph.resident_bytes, abs=1e5
    )


@pytest.mark.slow
def test_exponentials_are_offered_only_where_their_place_changes_no_bit(monkeypatch) -> None:
    model, (x, y) = Head(LOSSES["the log of the sum, by hand"]), batch()
    assert len(trace_variants(model, (x, y)).planned) == 3
    monkeypatch.setattr(probe, "_same_exponentials", lambda *form: False)
    assert [g.meta.rewrites for g in trace_variants(model, (x, y)).planned] == [[], ["in_place"]]
