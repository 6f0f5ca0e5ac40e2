"""Peaks that others measured on their GPUs, predicted."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from benchmarks.published.__main__ import DATA, compared
from benchmarks.published.shares import FITTED, ratio_range
from benchmarks.published.tables import is_met, markdown
from solver.plan_analysis import LARGEST_RATIO, LEAST_RATIO

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
        ({"config": {}}, "not one of the releases described here"),
    ],
)
def test_what_cannot_be_predicted_says_why(changed, reason):
    (result,) = compared([{**ROWS[0], **changed}])
    assert reason in result["reason"]
    assert reason in markdown(
        {"circumstances": {"command": "", "date": "", "versions": {}}, "rows": [result]}
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"technique": "+compile"}, "Inductor"),
        ({"technique": "BF16", "model": "Llama-3.2-3B full finetune"}, "are not given"),
        ({"technique": "x", "model": "M", "seq": 1, "batch_per_gpu": 1}, "not described here"),
    ],
)
def test_a_whole_model_that_is_not_described_says_why(model, reason):
    row = {"level": "model", "source": "s", "gpu": "1xA100", "peak_GB": 1.0, "model": "", **model}
    (result,) = compared([row])
    assert reason in result["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "measured_gb"), [(1, 4.82), (4, 10.68)])
def test_adapters_are_predicted(batch_size, measured_gb):
    """Within the rounding of the published figure and the bytes of the allocator's 512."""
    rows = json.loads((DATA / "models.json").read_text())["rows"]
    (row,) = (
        row
        for row in rows
        if row["model"] == "phi-1.5 1.3B LoRA" and row["batch_per_gpu"] == batch_size
    )
    (result,) = compared([row])
    assert result["measured"] == measured_gb
    assert abs(result["off"]) < 0.002


def test_times_are_predicted_and_the_fitted_share_is_their_median():
    results = compared(row for row in ROWS if row["op"].startswith("tiled"))
    errors = [abs(result["off"]) for result in results]
    assert len(errors) == 10
    assert max(errors) < 0.1
    shares = [result["rate_share"] for result in results]
    assert statistics.median(shares) == pytest.approx(FITTED["rtx4090"], abs=0.005)


@pytest.mark.slow
def test_the_peak_of_a_whole_model_is_predicted():
    rows = json.loads((DATA / "models.json").read_text())["rows"]
    (result,) = compared([row for row in rows if row.get("technique") == "+packed"])
    assert abs(result["off"]) < 0.015
    assert result["rate_share"] == pytest.approx(FITTED["a100"], abs=0.01)
    assert result["ratio"] == pytest.approx((LEAST_RATIO, LARGEST_RATIO), abs=0.01)


def test_the_ratio_of_two_shares_gives_the_measured_time():
    """At both ends one share is 1, and the other one gives the rest of the measured time."""
    least, largest = ratio_range(6.0, 2.0, 10.0)
    assert 6.0 / least + 2.0 == pytest.approx(10.0)
    assert 6.0 + 2.0 * largest == pytest.approx(10.0)
    assert ratio_range(6.0, 5.0, 10.0) is None


def test_times_of_modules_leave_no_wider_range():
    results = compared(row for row in ROWS if row["op"].startswith("tiled"))
    ratios = [result["ratio"] for result in results if result["ratio"] is not None]
    assert len(ratios) > 5
    assert all(LEAST_RATIO < low < high < LARGEST_RATIO for low, high in ratios)


@pytest.mark.slow
def test_every_published_peak_is_met():
    peaks = [row for row in compared(ROWS) if row["metric"] == "max_memory_allocated MiB"]
    assert len(peaks) == 74
    assert all(is_met(row) for row in peaks)
