"""Planned tensor-parallel steps: two processes, with and without the plans."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT


def ranks(*arguments: str) -> list[dict[str, Any]]:
    """What each rank found, a dict for each plan."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.tensor_ranks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["colwise", "sequence"])
def test_each_rank_has_the_same_bits_and_holds_what_was_predicted(case: str) -> None:
    found = ranks("2", case)
    assert len(found) == 2 * 3  # two ranks, three budgets
    for each in found:
        assert each["same"], each
        assert each["same_placements"], each
        assert each["n_recomputed"] > 0, each
        assert each["measured_bytes"] <= each["predicted_bytes"], each
        assert each["measured_bytes"] >= 0.95 * each["predicted_bytes"], each
        assert each["plain_measured_bytes"] <= each["plain_predicted_bytes"], each
    of_rank = [
        [each["predicted_bytes"] for each in found if each["rank"] == rank] for rank in (0, 1)
    ]
    assert of_rank[0] == of_rank[1]
    assert sorted(of_rank[0], reverse=True) == of_rank[0]
