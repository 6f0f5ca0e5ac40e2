"""The peak of a rank with several stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphs import Pipeline, PipelineError
from solver import Solution, rank_peak_bytes, solve

WIDTH, ROWS = 16, 64


def planned(stage: int, *, n_layers: int = 2, n_stages: int = 4, **options: Any) -> Solution:
    """One of two stages of its rank: the first of the pipeline, or one in its middle."""
    place = Pipeline(stage, n_stages, n_stages, "interleaved", 2)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(n_layers)]
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=not place.is_first)
    return solve(nn.Sequential(*layers), x, pipeline=place, **({"budget": "1MB"} | options))


def test_of_equal_stages_it_is_the_peak_of_each() -> None:
    one, other = (planned(stage, n_stages=6) for stage in (1, 4))
    assert one.simulation is not None
    assert one.simulation == other.simulation
    assert rank_peak_bytes([one, other]) == one.simulation.peak_bytes


def test_of_stages_that_differ_it_is_more_than_that_of_either() -> None:
    small, large = planned(0), planned(2, n_layers=6)
    assert small.simulation is not None
    assert large.simulation is not None
    found = rank_peak_bytes([small, large])
    assert found == rank_peak_bytes([large, small])
    assert found >= large.simulation.peak_bytes > small.simulation.peak_bytes
    graph = large.graph  # what the other stage's passes in flight save is at most what its own do
    others_bytes = (graph.n_in_flight - 1) * large.simulation.saved_bytes
    assert found >= graph.resident_bytes + others_bytes


def test_what_are_not_the_stages_of_one_rank_is_refused() -> None:
    first, second, third = planned(0), planned(1), planned(2)
    assert rank_peak_bytes([first, third]) > 0
    with pytest.raises(
        PipelineError, match=r"stages of rank 0 are \[0, 2\], and the plans are for"
    ):
        rank_peak_bytes([first])
    with pytest.raises(PipelineError, match="the stages of rank 0"):
        rank_peak_bytes([first, second])
    with pytest.raises(PipelineError, match="a stage of rank 0 has no plan"):
        rank_peak_bytes([first, planned(2, budget="1kB")])
    with pytest.raises(PipelineError, match="made with pipeline="):
        rank_peak_bytes([])
    x = torch.empty(ROWS, WIDTH, device="meta")
    alone = solve(nn.Linear(WIDTH, 1), x, loss=lambda y, _: y.sum(), budget="1MB")
    with pytest.raises(PipelineError, match="made with pipeline="):
        rank_peak_bytes([first, alone])
