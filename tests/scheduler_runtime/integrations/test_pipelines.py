"""Planned stages under torch.distributed.pipelining: two processes, with and without the plans.

Under "interleaved" each process has two stages, which differ: the first one has no gradient of its
input, the last one has the loss.
"""

from __future__ import annotations

import math

import pytest

from tests.support.pipeline_ranks import N_MICROBATCHES, SHAPES
from tests.support.pipelining import n_unheld
from tests.support.ranks import ranks_of


@pytest.mark.slow(keep=2)
@pytest.mark.distributed
@pytest.mark.parametrize("case", ["1f1b", "gpipe wide", "gpipe", "interleaved"])
def test_each_stage_has_the_same_bits_and_holds_what_was_predicted(case: str) -> None:
    schedule, *shape = case.split()
    found = ranks_of("pipeline_ranks", schedule, "2", *shape)
    first, last = sorted(found, key=lambda each: each["stage"])
    in_flight = {"1f1b": (2, 1), "gpipe": (4, 4), "interleaved": (5, 3)}[schedule]
    assert (first["n_in_flight"], last["n_in_flight"]) == in_flight
    for each in (first, last):
        unheld_bytes = 0
        if each is first and schedule != "interleaved":
            tensor_bytes = 4 * math.prod(SHAPES["".join(shape)].size)
            unheld_bytes = tensor_bytes * n_unheld(schedule, in_flight[0], N_MICROBATCHES)
        assert each["same"], each
        assert each["n_recomputed"] > 0, each
        assert each["warnings"] == [], each
        assert each["measured_bytes"] <= each["predicted_bytes"], each
        assert each["measured_bytes"] < each["plain_measured_bytes"], each
        assert each["plain_measured_bytes"] <= each["plain_predicted_bytes"], each
        # of stages that differ, the prediction takes the buffers of the one that has most
        least = 0.85 if schedule == "interleaved" else 0.985
        held_bytes = each["predicted_bytes"] - unheld_bytes
        assert each["measured_bytes"] >= least * held_bytes, each
        held_bytes = each["plain_predicted_bytes"] - unheld_bytes
        assert each["plain_measured_bytes"] >= least * held_bytes, each
