"""Rows of the benchmark of transformers' families: what is measured, and what counts as a fault."""

from __future__ import annotations

import pytest

from benchmarks import families, harness

PLANNED = {
    "family": "net",
    "batch": "",
    "n_nodes": 9,
    "opaque": [],
    "plain_peak_bytes": 3_000_000_000,
    "budget_bytes": 2_000_000_000,
    "changed": [],
    "n_recomputed": 2,
    "overhead": 0.05,
    "n_compared": 7,
    "differences": [],
    "predicted_peak_bytes": 1_900_000_000,
    "measured_peak_bytes": 1_900_000_000,
}


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({"differences": ["step 1: loss differs"]}, "step 1: loss differs"),
        ({"changed": ["the random state"]}, "tracing has changed the random state"),
        ({"measured_peak_bytes": 2_000_000_001}, "above the budget of 2000000000"),
        ({"measured_peak_bytes": 1_000_000_000}, "peak 1000000000 bytes, predicted 1900000000"),
        ({"failed": "ValueError: x"}, "ValueError: x"),
    ],
)
def test_a_broken_promise_is_a_fault(found: dict[str, object], fault: str) -> None:
    assert families.faults(PLANNED) == []
    assert fault in "; ".join(families.faults(PLANNED | found))


def test_how_a_row_ends_is_in_the_table() -> None:
    refused = {"family": "other", "batch": "", "refused": "it cannot be traced", "changed": []}
    pieces = PLANNED | {"opaque": [{"why": "it reads values"}]}
    report = {
        "circumstances": harness.circumstances(5.0),
        "families": {"net": [PLANNED, pieces], "other": [refused]},
    }
    text = families.markdown(report)
    assert "2 families, 3 batches: 2 planned, 1 refused (1 of the planned with parts" in text
    assert "0 with a fault. 14 tensors were compared bitwise" in text
    assert "planned, 1 piece: it reads values |" in text
    assert "refused: it cannot be traced |" in text


@pytest.mark.slow
def test_a_family_is_trained_and_compared() -> None:
    pytest.importorskip("transformers")
    (row,) = families.rows_of("vit", n_batches=1, time_limit_s=600)
    assert families.outcome(row) == "planned"
    assert families.faults(row) == []
    assert row["n_recomputed"] > 0
    assert row["n_compared"] > 100
    assert row["measured_peak_bytes"] <= row["budget_bytes"] < row["plain_peak_bytes"]
