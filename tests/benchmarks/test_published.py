"""Peaks that others measured on their GPUs, predicted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.__main__ import DATA, RESULT, compare_rows, rows_in
from benchmarks.published.scripts import SCRIPTS
from benchmarks.published.tables import is_exact, markdown
from tests.support.paths import ROOT

ROWS: list[dict[str, Any]] = json.loads((DATA / "modules.json").read_text())["rows"]
ALONE = ("cross_entropy", "swiglu", "rms_norm", "layer_norm", "rope", "fused_linear_jsd")
"""Scripts whose rows need no fitted constant; one row of each is cheap."""


@pytest.mark.slow(sample=2, keep=0)
@pytest.mark.parametrize("script", ALONE)
def test_a_published_peak_is_predicted(script):
    row = next(row for row in ROWS if row["op"] == script)
    (result,) = compare_rows([row])
    assert "constant" not in result
    assert abs(result["predicted"] - row["value"]) < 0.02  # MiB


def test_a_row_of_a_series_has_the_constant_of_the_others():
    series = [row for row in ROWS if row["op"] == "embedding"][:3]
    results = compare_rows(series)
    assert all(is_exact(result) for result in results)
    (alone,) = compare_rows(series[:1])
    assert "predicted" not in alone
    assert "another row of the series is needed" in alone["reason"]
    (with_known,) = compare_rows(series[:1], known=series)
    assert with_known["constant"] == results[0]["constant"]


def test_a_row_does_not_fit_its_own_constant():
    """A wrong row of a series of two is off by what it is wrong, and so is the other."""
    series = [dict(row) for row in ROWS if row["op"] == "embedding"][:2]
    series[0]["value"] += 1000.0
    wrong, right = compare_rows(series)
    assert wrong["predicted"] - wrong["measured"] == pytest.approx(-1000.0, abs=0.5)
    assert right["predicted"] - right["measured"] == pytest.approx(1000.0, abs=0.5)


NORM = next(row for row in ROWS if row["op"] == "rms_norm")


def shown(result: dict[str, Any]) -> str:
    circumstances = {"command": "", "date": "", "versions": {}}
    return markdown({"circumstances": circumstances, "rows": [result]})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"provider": "liger"}, "its own kernels"),
        ({"provider": None}, "provider is None"),
        ({"op": "an_op"}, "the script of an_op"),
        ({"op": "kto_loss"}, "drawn at random"),
        ({"op": "multi_token_attention"}, "cuDNN's choice"),
        ({"gpu": "Card 9"}, "no figures of Card 9"),
        ({"gpu": 9}, "gpu is 9"),
        ({"metric": "watts"}, "metric 'watts'"),
        ({"level": None}, "level is None"),
        ({"value": "many"}, "value is 'many'"),
        ({"value": 0}, "a measured number above 0"),
        ({"value": float("nan")}, "a measured number above 0"),
        ({"config": {}}, "not one of the releases described here"),
        ({"config": "M 2048"}, "settings by name are needed"),
        ({"config": {**NORM["config"], "dtype": "torch.int64"}}, "dtype is 'torch.int64'"),
        ({"config": {**NORM["config"], "dtype": "torch.float8_e4m3fn"}}, "one of torch.float32"),
        ({"config": {**NORM["config"], "M": True}}, "M is True"),
        ({"config": {**NORM["config"], "elementwise": False}}, "its setting 'elementwise'"),
        ({"x": None}, "settings by name are needed"),
        ({"x": {"H": "wide"}}, "H is 'wide'"),
        ({"x": {"H": -4}}, "H is -4"),
        ({"x": {"H": 2**60}}, "a whole number above 0"),
        ({"x": {"H": "1024", "M": "2048"}}, "M is in config and in x"),
    ],
)
def test_what_cannot_be_predicted_says_why(changed, reason):
    (result,) = compare_rows([{**NORM, **changed}])
    assert "predicted" not in result
    assert reason in result["reason"]
    assert reason in shown(result)


@pytest.mark.parametrize("name", [*NORM])
def test_a_missing_field_is_named_where_it_matters(name):
    (result,) = compare_rows([{key: value for key, value in NORM.items() if key != name}])
    shown(result)
    if name in ("source", "version", "date"):
        assert "predicted" in result
    else:
        assert result["reason"].startswith(name)


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("row", [None, 7, "row", [], {}])
def test_what_is_no_row_stops_no_other(row):
    no_row, norm = compare_rows([row, NORM])
    assert "level is None" in no_row["reason"]
    assert is_exact(norm)
    assert "level is None" in shown(no_row)


def test_a_file_of_rows_is_a_list_or_has_one(tmp_path: Path):
    path = tmp_path / "rows.json"
    for text in ("[1]", '{"rows": [1]}'):
        path.write_text(text)
        assert rows_in([path]) == [1]
    for text in ("{}", "7", "{"):
        path.write_text(text)
        with pytest.raises(SystemExit, match=str(path)):
            rows_in([path])


HEADS = {"T": 1024, "H": 4096, "V": 128256, "dtype": "torch.bfloat16"}
NARROW = {"dtype": "torch.bfloat16", "num_q_heads": 32, "num_kv_heads": 8}
NEAR_TOKENS = {
    "dtype": "torch.bfloat16",
    "hidden_size": 512,
    "num_heads": 8,
    "seq_len": 2048,
    "kernel_size": 7,
    "dilation": 1,
    "bias": True,
}
DISTILLED = next(row for row in ROWS if row["op"] == "distill_jsd_loss")["config"]
UNSEEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused_add_rms_norm": ({"M": 2048, "dtype": "torch.bfloat16", "eps": 1e-6}, {"H": "4096"}),
    "poly_norm": ({"M": 2048, "dtype": "torch.bfloat16", "eps": 1e-6}, {"H": "4096"}),
    "group_norm": (
        {"M": 128, "H": 512, "channels_per_group": 4, "dtype": "torch.float32", "eps": 1e-6},
        {"C": "512"},
    ),
    "dyt": ({"hidden_size": 4096, "dtype": "torch.float32"}, {"BT": "4096"}),
    "qwen2vl_mrope": ({**NARROW, "hidden_size": 8192}, {"T": "2048"}),
    "llama4_rope": ({**NARROW, "seq_len": 2048}, {"H": "8192"}),
    "kl_div": ({"B": 8, "T": 512}, {"V": "4096"}),
    "jsd": ({"B": 4, "T": 2048}, {"V": "4096"}),
    "tvd": ({"B": 8, "T": 2048}, {"V": "4096"}),
    "distill_cosine_loss": (DISTILLED, {"BT": "1024"}),
    "fused_linear_cpo_loss": (HEADS, {"B": "2"}),
    "fused_linear_simpo_loss": (HEADS, {"B": "2"}),
    "fused_linear_grpo_loss_token": ({**HEADS, "importance_sampling_level": "token"}, {"B": "2"}),
    "fused_linear_grpo_loss_sequence": (
        {**HEADS, "importance_sampling_level": "sequence"},
        {"B": "2"},
    ),
    "softmax": ({"M": 2048, "dtype": "torch.float32"}, {"N": "4096"}),
    "fused_neighborhood_attention": (NEAR_TOKENS, {"batch_size": "2"}),
    "dpo_loss": ({**HEADS, "bias": True, "beta": 0.1, "ignore_index": 42}, {"B": "2"}),
}
"""Scripts of which no row is known, with settings as in their releases."""


def test_each_script_has_a_row_or_settings():
    assert set(SCRIPTS) == {row["op"] for row in ROWS} | set(UNSEEN)


@pytest.mark.slow(sample=1, keep=6)
@pytest.mark.parametrize("op", UNSEEN)
@pytest.mark.parametrize("metric", ["max_memory_allocated MiB", "median ms fwd+bwd"])
def test_scripts_without_a_known_row_are_predicted(op, metric):
    config, x = UNSEEN[op]
    date = "2025-03-03 15:39:46"
    row = {**NORM, "op": op, "config": config, "x": x, "metric": metric, "date": date}
    twice = {**row, "x": {name: str(2 * int(value)) for name, value in x.items()}}
    one, two = compare_rows([row, twice])
    assert "reason" not in one
    if "constant" not in one:
        assert one["predicted"] < two["predicted"] < 2.05 * one["predicted"]


@pytest.mark.slow
def test_peaks_counted_by_hand():
    """Attention written out, in the softmax's backward function: its result, the gradient of that
    and the one of the scores; cuBLAS; x, its gradient and the output's; four matrices, their
    gradients and four more; copies of query, key and value by heads; the mask; what goes into the
    last product, its result, and the gradient of the values.

    Total variation: logits, their gradient of earlier calls, probabilities and targets are
    there, and the difference is saved; the absolute value's gradient is made of that of the half
    and of the sign. Eight of a size: at 2**17 classes 64 GiB; the script says that it needs 66 GB.
    """
    config, x = {"B": 8, "T": 2048}, {"V": "4096"}
    attention = {**NORM, "op": "fused_neighborhood_attention", "gpu": "NVIDIA H100 80GB HBM3"}
    written_out, distance = compare_rows(
        [
            {**attention, "config": NEAR_TOKENS, "x": {"batch_size": "2"}},
            {**NORM, "op": "tvd", "config": config, "x": x},
        ]
    )
    scores_mib, matrix_mib, x_mib, mask_mib = 2 * 8 * 2 * 2048**2 / 2**20, 0.5, 4, 4
    expected = 3 * scores_mib + 2 * 32 + 3 * x_mib + 12 * matrix_mib + 3 * x_mib + mask_mib
    assert written_out["predicted"] == pytest.approx(expected + 3 * x_mib, abs=0.02)
    each_mib = 4 * 8 * 2048 * 4096 / 2**20
    assert distance["predicted"] == pytest.approx(8 * each_mib, abs=0.01)


def varied(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Other dtypes, cards and sizes of a row."""
    rows = []
    for dtype in ("torch.float32", "torch.bfloat16", "torch.float16"):
        if "dtype" in row["config"]:
            rows.append({**row, "config": {**row["config"], "dtype": dtype}})
    rows += [
        {**row, "gpu": gpu}
        for gpu in (
            "NVIDIA H200",
            "NVIDIA L40S",
            "Tesla T4",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA B200",
        )
    ]
    other = copy.deepcopy(row)
    for name, value in other["x"].items():
        other["x"][name] = 3 * int(value)
    return [*rows, other]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("op", [*ALONE, *sorted(SCRIPTS.keys() - UNSEEN.keys() - {*ALONE})])
def test_other_sizes_dtypes_and_cards_are_predicted(op):
    row = next(row for row in ROWS if row["op"] == op)
    for result in compare_rows(varied(row), known=ROWS):
        needs_series = "another row of the series is needed" in result.get("reason", "")
        assert needs_series or result["predicted"] > 0


def test_the_readme_says_what_the_table_has():
    report = json.loads(RESULT.read_text())
    assert report["circumstances"]["command"].startswith("python -m benchmarks.published")
    rows = [row for row in report["rows"] if "predicted" in row]
    peaks = [row for row in rows if row.get("metric") == "max_memory_allocated MiB"]
    alone = [row for row in peaks if "constant" not in row]
    tuned = [row for row in rows if row["level"] == "model" and "FSDP2" not in str(row)]
    sharded = [row for row in rows if row["level"] == "model" and "FSDP2" in str(row)]
    assert all(abs(row["predicted"] - row["measured"]) < 0.02 for row in alone)
    assert (len(tuned), len(sharded)) == (10, 2)
    assert max(abs(row["off"]) for row in tuned) < 0.006
    assert max(abs(row["off"]) for row in sharded) < 0.0085
    fitted = [row for row in peaks if "constant" in row]
    assert all(abs(row["predicted"] - row["measured"]) < 0.4 for row in fitted)
    words = (
        f"{len(alone)} modules within 0.02 MiB, {len(fitted)} within 0.4 MiB (what earlier "
        "runs left is fitted), ten fine-tunings within 0.6 %, FSDP2 within 0.8 %"
    )
    assert words in " ".join((ROOT / "README.md").read_text().replace("\n>", "\n").split())


@pytest.mark.slow
def test_every_published_peak_is_met():
    peaks = compare_rows(row for row in ROWS if row["metric"] == "max_memory_allocated MiB")
    assert len(peaks) == 74
    assert all(is_exact(row) for row in peaks)
