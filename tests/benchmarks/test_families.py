"""Rows of the benchmark of transformers' families: what is measured, and what counts as a fault."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from benchmarks import families, harness
from benchmarks.zoo.timm_models import ImageModel, Labelled

PLANNED = {
    "family": "net",
    "class": "Net",
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
    refused = {
        "family": "other",
        "class": "Other",
        "batch": "",
        "refused": "it cannot be traced",
        "changed": [],
    }
    pieces = PLANNED | {"opaque": [{"why": "it reads values"}]}
    report = {
        "circumstances": harness.circumstances(5.0),
        "families": {"net": [PLANNED, pieces], "other": [refused]},
    }
    text = families.markdown(report)
    assert "2 of 107 families, 3 batches: 2 planned, 1 refused (1 of the planned with parts" in text
    assert "0 with a fault. 14 tensors were compared bitwise" in text
    assert "planned, 1 piece: it reads values |" in text
    assert "refused: it cannot be traced |" in text


@pytest.mark.slow
def test_a_family_is_trained_and_compared() -> None:
    pytest.importorskip("transformers")
    (row,) = families.rows_of("transformers", "vit", n_batches=1, time_limit_s=600)
    assert families.outcome(row) == "planned"
    assert families.faults(row) == []
    assert row["n_recomputed"] > 0
    assert row["n_compared"] > 100
    assert row["measured_peak_bytes"] <= row["budget_bytes"] < row["plain_peak_bytes"]


def test_families_of_another_library_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["families", "--library", "timm", "--families", "vgg;gpt2"])
    with pytest.raises(SystemExit):
        families.main()
    assert "argument --families: 'gpt2' is not one of beit; " in capsys.readouterr().err


class SmallNet(ImageModel):
    """What timm would build, without timm."""

    def made(self, batch: str) -> tuple[nn.Module, Labelled]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3), nn.Tanh()
        )
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        return nn.Sequential(model, head), self.batches[batch]()


@pytest.mark.slow
def test_logits_are_trained_with_the_loss_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.LIBRARIES, "timm", {"net": SmallNet("small", side=32)})
    (row,) = families.rows_of("timm", "net", n_batches=2, time_limit_s=600)
    assert row["batch"] == "8 x 32 px"
    assert families.outcome(row).startswith("planned")
    assert families.faults(row) == []
    assert row["n_recomputed"] > 0
