"""The peak of a rank with several stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from graphs import Pipeline, PipelineError
from graphs.pipeline import pipeline_of
from solver import Solution, rank_peak_bytes, share_rank_budget, solve

WIDTH, ROWS = 16, 64


def planned(stage: int, *, n_layers: int = 2, n_stages: int = 4, **options: Any) -> Solution:
    """One of two stages of its rank: the first of the pipeline, or one in its middle."""
    place = Pipeline(stage, n_stages, n_stages, "interleaved", 2)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(n_layers)]
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=not place.is_first)
    return solve(nn.Sequential(*layers), x, pipeline=place, **({"budget": "1MB"} | options))


def test_of_equal_stages_it_is_the_peak_of_each() -> None:
    one, other = (planned(stage, n_stages=6) for stage in (1, 4))
    assert one.simulation == other.simulation
    assert rank_peak_bytes([one, other]) == one.simulation.peak_bytes


def replayed_bytes(solutions: list[Solution]) -> int:
    """Beside what is resident, by the list of what torch's schedule runs on this rank."""
    place = pipeline_of(solutions[0].environment)
    torchs = object.__new__(ScheduleInterleaved1F1B)
    torchs.pp_group_size, torchs.n_local_stages = place.n_ranks, place.stages_per_rank
    torchs._n_microbatches = place.n_microbatches
    torchs.microbatches_per_round = place.n_ranks  # as many as there are, in two rounds
    held: dict[tuple[int, int], int] = {}
    most_bytes = 0
    for action in torchs._calculate_single_rank_operations(place.stage % place.n_ranks):
        if action is None:
            continue
        of_stage = solutions[action.stage_index // place.n_ranks]
        found, graph = of_stage.simulation, of_stage.graph
        others_bytes = (graph.n_in_flight - 1) * found.saved_bytes
        here = action.stage_index, action.microbatch_index
        held.pop(here, None)
        step_bytes = found.peak_bytes - graph.resident_bytes - others_bytes
        most_bytes = max(most_bytes, sum(held.values()) + step_bytes)
        if action.computation_type.name == "FORWARD":
            held[here] = found.saved_bytes
    return most_bytes


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("n_layers", [(2, 6), (6, 2)])
def test_of_stages_that_differ_it_is_what_each_saves(n_layers: tuple[int, int]) -> None:
    first, second = (planned(2 * i, n_layers=n) for i, n in enumerate(n_layers))
    peaks = [each.simulation.peak_bytes for each in (first, second) if each.simulation]
    found = rank_peak_bytes([first, second])
    assert found == rank_peak_bytes([second, first])
    assert min(peaks) < found < max(peaks)  # that of two stages like the smaller, or the larger
    kinds = ("parameter", "buffer", "gradient", "optimizer_state")
    own_bytes, beside_bytes = 0, []
    for each in (first, second):
        of_stage = [t for t in each.graph.resident if ".other_stages." not in t.name]
        own = [t for t in of_stage if t.kind in kinds and not t.name.startswith("pipeline.")]
        own_bytes += sum(t.size_bytes for t in own)
        beside_bytes.append(sum(t.size_bytes for t in of_stage if t not in own))
    there_bytes = found - own_bytes - replayed_bytes([first, second])
    assert 0 < max(beside_bytes) <= there_bytes < sum(beside_bytes)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("share", [0.95, 0.85])
def test_a_budget_is_divided_between_the_stages_of_a_rank(share: float) -> None:
    """The smaller stage saves less than the larger one, which may therefore save more."""
    budget = int(share * rank_peak_bytes([planned(0), planned(2, n_layers=4)]))
    alone = [planned(0, budget=budget), planned(2, n_layers=4, budget=budget)]
    shared = share_rank_budget(alone)
    assert shared.status == "optimal"
    assert rank_peak_bytes(shared) <= budget
    assert [each.environment["pipeline"]["stage"] for each in shared] == [0, 2]
    assert alone[1].simulation is not None
    assert seconds(shared) <= seconds(alone) * (1 + 1e-9)
    peaks = [each.simulation.peak_bytes for each in shared if each.simulation]
    assert max(peaks) > budget  # if both were like the larger one
    if share > 0.9:
        assert seconds(shared) < 0.95 * seconds(alone)


def seconds(solutions: Sequence[Solution]) -> float:
    return sum(each.simulation.time_s for each in solutions if each.simulation)


@pytest.mark.slow
def test_plans_that_fit_together_are_not_made_slower() -> None:
    plans = [planned(0), planned(2)]
    shared = share_rank_budget(plans)
    assert seconds(shared) == seconds(plans)
    with pytest.raises(
        PipelineError, match=r"fit 1000 bytes together \(proven\); the smallest peak"
    ):
        share_rank_budget([planned(i, budget=1000) for i in (0, 2)])
    with pytest.raises(PipelineError, match="share one budget, but were solved for"):
        share_rank_budget([plans[0], planned(2, budget="2MB")])
    with pytest.raises(PipelineError, match="rank 0 has the stages"):
        share_rank_budget([plans[0]])


@pytest.mark.slow
def test_what_are_not_the_stages_of_one_rank_is_refused() -> None:
    first, second, third = planned(0), planned(1), planned(2)
    assert rank_peak_bytes([first, third]) > 0
    with pytest.raises(
        PipelineError, match=r"rank 0 has the stages \[0, 2\], but the plans are for"
    ):
        rank_peak_bytes([first])
    with pytest.raises(PipelineError, match="rank 0 has the stages"):
        rank_peak_bytes([first, second])
    with pytest.raises(PipelineError, match="a stage of rank 0 has no plan"):
        rank_peak_bytes([first, planned(2, budget="1kB")])
    with pytest.raises(PipelineError, match="made with pipeline="):
        rank_peak_bytes([])
    x = torch.empty(ROWS, WIDTH, device="meta")
    alone = solve(nn.Linear(WIDTH, 1), x, loss=lambda y, _: y.sum(), budget="1MB")
    with pytest.raises(PipelineError, match="made with pipeline="):
        rank_peak_bytes([first, alone])
