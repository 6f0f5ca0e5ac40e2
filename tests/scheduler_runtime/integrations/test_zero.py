"""Plans for ranks of ZeRO under DeepSpeed's engine: predicted and measured peaks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from checkpoint_solver import Zero, apply, solve
from checkpoint_solver.export import to_torch_checkpoint
from tests.support.ranks import ranks_of


def test_a_plan_for_stage_3_is_exported_and_not_applied() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero = Zero(3, n_ranks=2, config={"zero_optimization": {"reduce_bucket_size": 100}})
    options = {"loss": lambda output, _: output.square().mean(), "optimizer": torch.optim.SGD}
    solution = solve(model, torch.zeros(4, 8), budget="1MB", zero=zero, **options)
    assert "per rank of 2, ZeRO-3" in str(solution)
    with pytest.raises(ValueError, match=r"per rank of 2, ZeRO-3.*to_torch_checkpoint"):
        apply(model, solution)
    assert to_torch_checkpoint(model, solution).sharded == "per rank of 2, ZeRO-3"


@pytest.mark.distributed
@pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="deepspeed, no dependency of the tests, is not installed; `pip install deepspeed`",
)
def test_no_rank_takes_more_than_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    found = ranks_of("zero_ranks")
    assert len({name for name, _, _ in found}) == len(found) // 2 == 20
    for name, rank, step in found:
        where = (name, rank, step)
        assert step["n_recomputed"] > 0, where
        assert step["measured_bytes"] <= step["predicted_bytes"] < step["baseline_bytes"], where
        # counted for the whole step, and there from the first gradients on
        counted = ("bucket_bytes", "own_bytes", "whole_bytes", "gathered_bytes")
        early_bytes = sum(step["of_engine"].get(part, 0) for part in counted)
        assert step["predicted_bytes"] <= 1.01 * step["measured_bytes"] + early_bytes, where
