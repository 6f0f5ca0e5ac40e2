"""What the GPU benchmark's figures must show: rows that hold and rows that miss."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import targets
from benchmarks.gpu.__main__ import _environment_variables
from benchmarks.gpu.parts import PARTS, Settings
from benchmarks.zoo import LARGE, SMALL, with_fitting_layers
from benchmarks.zoo.on_gpu import N_LAYERS_OF_8B, llama_layers


def ways(**changed: float) -> dict[str, dict]:
    ours = {
        "status": "ran",
        "samples_per_s": 10.0,
        "peak_bytes": 1000,
        "peak_off": 0.004,
        "time_off": -0.03,
        "measured_overhead": 0.05,
        "bound": 0.04,
    }
    return {
        "gpt2/eager": {"status": "ran", "samples_per_s": 12.0, "peak_bytes": 2000},
        "gpt2/every block": {"status": "ran", "samples_per_s": 9.0, "peak_bytes": 990},
        "gpt2/selective": {"status": "out of memory"},
        "gpt2/ours/0.5": {**ours, **changed},
        "unet/every block": {"status": "ran", "samples_per_s": 99.0, "peak_bytes": 10},
    }


def missed(cases: dict[str, dict]) -> dict[str, list[str]]:
    found = targets.check_targets({"ways": cases})
    return {name: list(target["missed"]) for name, target in found.items()}


def test_a_row_that_meets_all_targets():
    assert missed(ways()) == {"peak": [], "time": [], "overhead": [], "faster": []}
    assert targets.check_targets({"ways": ways()})["faster"]["n_rows"] == 1


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("peak", {"peak_off": -0.006}),
        ("peak", {"peak_off": 0.011}),
        ("time", {"time_off": 0.06}),
        ("overhead", {"measured_overhead": 0.07}),
        ("faster", {"samples_per_s": 8.9}),
    ],
)
def test_each_target_can_be_missed(name, changed):
    found = missed(ways(**changed))
    assert found.pop(name) == ["gpt2/ours/0.5"]
    assert not any(found.values())


def test_a_stock_way_that_takes_more_memory_is_no_rival():
    cases = ways(peak_bytes=900)
    assert "faster" not in missed(cases), "nothing to compare with"


def test_budgets_bits_and_the_host_have_targets():
    kept = {"status": "ran", "kept": True, "plain_fails": True, "peak_off": 0.0}
    found = targets.check_targets(
        {
            "budget": {
                "gpt2/0.5": kept,
                "gpt2/0.4": {**kept, "plain_fails": False},
                "unet/0.5": {"status": "refused", "reason": "nothing fits"},
            },
            "bits": {"a/ours": {"status": "ran", "n_different": 0}, "b/ours": {"status": "failed"}},
            "host": {
                "gpt2/eager": {"status": "ran", "host_s": 1.0},
                "gpt2/ours": {"status": "ran", "host_s": 1.2},
            },
        }
    )
    assert list(found["kept"]["missed"]) == ["gpt2/0.4", "unet/0.5"]
    assert found["peak"]["n_rows"] == 2
    assert list(found["bits"]["missed"]) == ["b/ours"]
    assert found["host"]["missed"] == {"gpt2/ours": "1.20 times eager's"}
    text = "\n".join(targets.target_lines(found))
    assert "training is bitwise identical: 1 of 2" in text
    assert "missed by unet/0.5: refused: nothing fits" in text
    assert list(targets.target_lines({})) == []


def test_as_many_layers_as_fit_the_card():
    assert llama_layers(150 * 10**9) == N_LAYERS_OF_8B
    assert llama_layers(16 * 10**9) == 1
    assert 1 < llama_layers(24 * 10**9) < llama_layers(80 * 10**9) < N_LAYERS_OF_8B
    with torch.device("meta"):
        model = with_fitting_layers(LARGE["llama-8b-2048"], 24 * 10**9).build()
    assert len(model.blocks) == llama_layers(24 * 10**9)
    assert with_fitting_layers(SMALL["gpt2"], 10**9) is SMALL["gpt2"]


def test_the_full_set_holds_enough_models_to_enough_budgets():
    cases = PARTS["budget"].cases(Settings(torch.device("cuda"), full=True))
    by_model: dict[str, set[str]] = {}
    for case in cases:
        by_model.setdefault(case.split("/")[0], set()).add(case.split("/")[1])
    assert len(by_model) >= 6
    assert all(len(shares) >= 6 for shares in by_model.values())


def test_the_allocator_is_told_by_the_name_that_wins():
    assert _environment_variables("gpt2/0.6") == {}
    assert _environment_variables("gpt2/0.6/expandable") == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
    }
