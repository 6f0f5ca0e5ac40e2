"""Ranks that do not agree stop, each with an error that says why; none waits for the others."""

from __future__ import annotations

import pytest

from tests.support.ranks import ranks_of

DIFFER = "RanksDisagreeError: the plans of ranks 0 and 1 differ in"
NO_PARAMETERS = "GELU has no parameters: it cannot be a stage (stage 1 of 2)"
EXPECTED = {
    "agree": ("planned", "planned"),
    "micro-batches": ("RanksDisagreeError: the plans of ranks 0 and 1 differ in n_microbatches: 4",)
    * 2,
    "places": ("RanksDisagreeError: ranks 0 to 1 have planned the stages 0, 0",) * 2,
    "no parameters": (
        f"RanksDisagreeError: rank 1 has no plan: PipelineError: {NO_PARAMETERS}",
        f"PipelineError: {NO_PARAMETERS}",
    ),
    "nothing fits": ("RanksDisagreeError: rank 1 has no plan: nothing fits",) * 2,
    "shapes": (f"{DIFFER} step",) * 2,
    "schedules": (f"{DIFFER} schedule",) * 2,
    "sharded shapes": (f"{DIFFER} step",) * 2,
    "exports": (f"{DIFFER} exported plan",) * 2,
    "not sharded": (
        "ShardingError: the solution is for a step that is not sharded",
        "RanksDisagreeError: rank 0 has no plan: ShardingError",
    ),
}


@pytest.mark.distributed
def test_each_rank_says_why_the_ranks_cannot_go_on() -> None:
    found = dict(ranks_of("disagreeing_ranks"))
    assert set(found) == {0, 1}
    for name, words in EXPECTED.items():
        for rank, expected in enumerate(words):
            assert found[rank][name].startswith(expected), (name, rank, found[rank][name])
        assert all(("time limit" in found[rank][name]) == (name == "schedules") for rank in (0, 1))


STEPS = {
    "agree": {},
    "first shape": {0: "a micro-batch differs from the planned one: argument input has sh"},
    "later shape": {0: "inputs of this step: float32 [64, 16]; of the first step: float32 ["},
    "later targets": {1: "targets of this step: "},
    "schedule": {1: "ScheduleGPipe runs stage 1 of 2, gpipe, 4 micro-batches, and the plan is of "},
    "micro-batches": {0: "Schedule1F1B runs stage 0 of 2, 1f1b, 2 micro-batches, and the plan is "},
    "agree at last": {},
}


@pytest.mark.distributed
def test_a_step_that_one_rank_cannot_run_begins_on_none() -> None:
    """Afterwards they train on: nothing had been sent."""
    found = dict(ranks_of("steps_of_ranks"))
    for name, unlike in STEPS.items():
        for rank, answers in found.items():
            expected = "trained"
            if rank in unlike:
                expected = f"PlanMismatchError: {unlike[rank]}"
            elif unlike:
                expected = f"RanksDisagreeError: rank {1 - rank} cannot run the step: PlanMismatch"
            assert answers[name].startswith(expected), (name, rank, answers[name])


@pytest.mark.distributed
def test_all_ranks_of_sharded_stages_say_why_they_cannot_go_on() -> None:
    """Ranks 0 and 1 have the first stage, 2 and 3 the last: 1 and 3 are one pipeline."""
    found = dict(ranks_of("disagreeing_stages"))
    assert set(found) == {0, 1, 2, 3}
    for rank, answers in found.items():
        assert answers["agree"] == "planned"
        for name in ("one fails", "micro-batches", "shapes"):
            assert "Error: " in answers[name], (rank, name, answers[name])
        assert "no model here" in answers["one fails"]
        assert "differ in n_microbatches: 4 and 5" in answers["micro-batches"]
        assert "differ in step" in answers["shapes"]
    assert found[3]["one fails"] == "ValueError: no model here"
