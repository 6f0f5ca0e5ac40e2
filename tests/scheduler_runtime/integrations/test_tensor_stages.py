"""Two stages of tensor-parallel blocks, on two ranks each: with and without plans."""

from __future__ import annotations

import pytest

from tests.support.ranks import ranks_of


@pytest.mark.slow
@pytest.mark.distributed
def test_each_rank_has_the_same_bits_and_holds_what_was_predicted() -> None:
    found = ranks_of("tensor_stage_ranks", "1f1b", "gpipe")
    of_ranks = [(schedule, rank) for schedule in ("1f1b", "gpipe") for rank in range(4)]
    assert sorted((each["schedule"], each["rank"]) for each in found) == of_ranks
    for each in found:
        assert each["same"], each
        assert each["n_recomputed"] > 0, each
        assert each["n_in_flight"] == (4 if each["schedule"] == "gpipe" else 2 - each["rank"] // 2)
        for kind in ("", "plain_"):
            measured, predicted = (each[f"{kind}{of}_bytes"] for of in ("measured", "predicted"))
            assert 0.97 * predicted <= measured <= predicted, each
