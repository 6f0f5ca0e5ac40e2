"""Peaks that others measured on their GPUs, predicted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.published.__main__ import DATA, compared
from benchmarks.published.tables import is_met, markdown

ROWS: list[dict[str, Any]] = json.loads((DATA / "modules.json").read_text())["rows"]
ALONE = ("cross_entropy", "swiglu", "rms_norm", "layer_norm", "rope", "fused_linear_jsd")
"""Scripts whose rows need no fitted constant; one row of each is cheap."""


@pytest.mark.parametrize("script", ALONE)
def test_a_published_peak_is_predicted(script):
    row = next(row for row in ROWS if row["op"] == script)
    (result,) = compared([row])
    assert "constant" not in result
    assert abs(result["predicted"] - row["value"]) < 0.02  # MiB


def test_rows_of_a_series_share_one_constant():
    series = [row for row in ROWS if row["op"] == "embedding"][:3]
    results = compared(series)
    assert len({result["constant"] for result in results}) == 1
    assert all(is_met(result) for result in results)
    (alone,) = compared(series[:1])
    assert "predicted" not in alone
    assert "a series of rows is needed" in alone["reason"]


def test_a_series_that_does_not_agree_is_not_predicted():
    series = [dict(row) for row in ROWS if row["op"] == "embedding"][:2]
    series[0]["value"] += 10.0
    assert all("predicted" not in result for result in compared(series))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"provider": "liger"}, "its own kernels"),
        ({"op": "an_op"}, "the script of an_op"),
        ({"gpu": "Card 9"}, "no figures of Card 9"),
        ({"metric": "watts"}, "metric 'watts'"),
    ],
)
def test_what_cannot_be_predicted_says_why(changed, reason):
    (result,) = compared([{**ROWS[0], **changed}])
    assert reason in result["reason"]
    assert reason in markdown(
        {"circumstances": {"command": "", "date": "", "versions": {}}, "rows": [result]}
    )


@pytest.mark.slow
def test_every_published_peak_is_met():
    peaks = [row for row in compared(ROWS) if row["metric"] == "max_memory_allocated MiB"]
    assert len(peaks) == 74
    assert all(is_met(row) for row in peaks)
