"""Planned tensor-parallel steps: two processes, with and without the plans."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.ranks import ranks_of


@pytest.mark.slow(keep=1)
@pytest.mark.distributed
@pytest.mark.parametrize("case", ["sequence", "colwise"])
def test_each_rank_has_the_same_bits_and_holds_what_was_predicted(case: str) -> None:
    found = ranks_of("tensor_ranks", "2", case)
    assert len(found) == 2 * 3  # two ranks, three budgets
    for each in found:
        assert each["same"], each
        assert each["same_placements"], each
        assert each["measured_bytes"] <= each["predicted_bytes"], each
        assert each["measured_bytes"] >= 0.95 * each["predicted_bytes"], each
        assert each["plain_measured_bytes"] <= each["plain_predicted_bytes"], each
    assert max(each["n_recomputed"] for each in found) > 0
    assert_same_on_both(found)


def assert_same_on_both(found: list[dict[str, Any]]) -> None:
    of_rank = [
        [each["predicted_bytes"] for each in found if each["rank"] == rank] for rank in (0, 1)
    ]
    assert of_rank[0] == of_rank[1]
    assert sorted(of_rank[0], reverse=True) == of_rank[0]


@pytest.mark.distributed
def test_a_loss_in_chunks_has_the_same_bits() -> None:
    """The head is whole on each rank, and its logits are never there at once."""
    found = ranks_of("tensor_ranks", "2", "chunked")
    assert len(found) == 2
    for each in found:
        assert "chunked_loss_backward" in each["rewrites"], each
        assert each["same"], each
        assert each["same_placements"], each
        assert each["measured_bytes"] <= each["predicted_bytes"], each
    assert_same_on_both(found)


@pytest.fixture(scope="module")
def disagreements() -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank found."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in sorted(ranks_of("tensor_disagreements"), key=lambda each: each["rank"]):
        found.setdefault(each["case"], []).append(each)
    return found


OTHER_PLANS = "RanksDisagreeError.*the plan is .* solve on one rank"
OTHER_SHAPES = (
    r"RanksDisagreeError: ranks 0 and 1 have different steps: the batch is "
    r"\['float32 \[2, 64, 32\]'\] on rank 0 and \['float32 \[2, 32, 32\]'\] on rank 1"
)
PLANNED_BY_ONE = (
    "RanksDisagreeError: ranks 0 and 1 have different steps: a plan for it is True on rank 0 and "
    "False on rank 1. Call the model the same number of times"
)
OTHER_EXPORTS = "RanksDisagreeError.*the exported plan is .* give to_torch_checkpoint that plan"
WRONG = {
    "other_plans": (OTHER_PLANS, OTHER_PLANS),
    "other_exports": (OTHER_EXPORTS, OTHER_EXPORTS),
    "export_fails_on_one": (
        "RanksDisagreeError: rank 1 cannot run the step: ExportError: the solution has no schedule",
        "ExportError: the solution has no schedule to export",
    ),
    "other_shapes": (OTHER_SHAPES, OTHER_SHAPES),
    "other_shapes_with_fit": (OTHER_SHAPES, OTHER_SHAPES),
    "later_shape": (OTHER_SHAPES, OTHER_SHAPES),
    "later_shape_with_apply": (OTHER_SHAPES, OTHER_SHAPES),
    "known_shapes": (OTHER_SHAPES, OTHER_SHAPES),
    "planned_by_one": (PLANNED_BY_ONE, PLANNED_BY_ONE),
    "copied_by_one": (PLANNED_BY_ONE, PLANNED_BY_ONE),
    "nothing_fits_one": (
        "RanksDisagreeError: rank 1 cannot run the step: FitError: no schedule",
        "FitError: no schedule of Net's step fits",
    ),
    "one_does_not_come": (
        "RanksDisagreeError: rank 0 waited for rank 1 for up to 2 s before a planned step",
        "^$",
    ),
}


@pytest.mark.distributed
def test_ranks_that_differ_all_get_an_error(disagreements: Any) -> None:
    """One test for all: the ranks are started once for each worker that has one."""
    for case, messages in WRONG.items():
        for each, message in zip(disagreements[case], messages, strict=True):
            assert re.search(message, each["error"]), (case, each)


@pytest.mark.distributed
def test_all_ranks_run_the_plan_of_the_first(disagreements: Any) -> None:
    first, second = disagreements["other_costs"]
    assert first["error"] == second["error"] == ""
    assert "Compute" in first["plan"]
    assert first["plan"] == second["plan"]
