"""Two stages, each sharded by FSDP2 over two ranks: four processes, with and without the plans."""

from __future__ import annotations

import pytest

from tests.support.pipelining import n_unheld
from tests.support.ranks import ranks_of
from tests.support.sharded_stage_ranks import CASES, LENGTH, ROWS


@pytest.mark.slow(keep=1)
@pytest.mark.distributed
@pytest.mark.parametrize("case", ["1f1b", "gpipe", "wide"])
def test_each_rank_has_the_same_bits_and_holds_what_was_predicted(case: str) -> None:
    found = ranks_of("sharded_stage_ranks", case)
    assert sorted((each["rank"], each["share"] < 1) for each in found) == [
        (rank, planned) for rank in range(4) for planned in (False, True)
    ]
    for each in found:
        assert each["same"], each
        assert each["n_in_flight"] == (8 if case == "gpipe" else 2 - each["stage"])
        assert bool(each["n_modules"]) == (each["share"] < 1)
        # GPipe holds most in the first backward pass, when no gradient is there yet
        least = 0.85 if case == "gpipe" else 0.97
        held_bytes = each["predicted_bytes"]
        if each["stage"] == 0:
            of_case = CASES[case]
            output_bytes = 4 * ROWS * LENGTH * of_case.width
            held_bytes -= output_bytes * n_unheld(
                of_case.schedule, each["n_in_flight"], of_case.n_microbatches
            )
        assert least * held_bytes <= each["measured_bytes"] <= each["predicted_bytes"]
    for stage in (0, 1):
        plain, planned = (
            {each["measured_bytes"] for each in found if each["stage"] == stage and is_of(each)}
            for is_of in (lambda each: each["share"] == 1, lambda each: each["share"] < 1)
        )
        assert max(planned) < min(plain)
