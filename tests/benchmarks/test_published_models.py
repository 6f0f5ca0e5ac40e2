"""Peaks of whole models that others measured on their GPUs, predicted: fine-tuning, FSDP2."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from benchmarks.published import lit_gpt, torchtitan
from benchmarks.published.__main__ import DATA, compare_rows
from benchmarks.published.models import _N_TOKENS, _SHAPES
from benchmarks.published.shares import FITTED
from graphs.hardware import named
from graphs.trace import trace
from solver.plan_analysis import LARGEST_RATIO, LEAST_RATIO
from solver.schedule import simulate, simulate_unplanned
from tests.benchmarks.test_published import shown


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"technique": "+compile"}, "Inductor"),
        ({"technique": "BF16 +compile"}, "Inductor"),
        ({"technique": "BF16", "model": "Qwen3-8B"}, "whether it is compiled is stated"),
        ({"technique": "+packed", "model": "Llama-3.2-3B full finetune"}, "are not given"),
        ({"technique": "x", "model": "M", "seq": 1, "batch_per_gpu": 1}, "not described here"),
    ],
)
def test_a_whole_model_that_is_not_described_says_why(model, reason):
    row = {"level": "model", "source": "s", "gpu": "1xA100", "peak_GB": 1.0, "model": "", **model}
    (result,) = compare_rows([row])
    assert reason in result["reason"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("batch_size", "measured_gb"), [(1, 4.82), (4, 10.68)])
def test_adapters_are_predicted(batch_size, measured_gb):
    """Within the rounding of the published figure and the bytes of the allocator's 512."""
    rows = json.loads((DATA / "models.json").read_text())["rows"]
    (row,) = (
        row
        for row in rows
        if row["model"] == "phi-1.5 1.3B LoRA" and row["batch_per_gpu"] == batch_size
    )
    (result,) = compare_rows([row])
    assert result["measured"] == measured_gb
    assert abs(result["off"]) < 0.002


@pytest.mark.slow
def test_of_adapters_alone_gradients_and_states_are_held():
    """Two layers. Frozen weights, adapters, their gradients and AdamW's two states are bfloat16."""
    shape = dataclasses.replace(lit_gpt.SHAPES["phi-1.5"], n_layers=2)
    tokens = torch.empty(1, 256, dtype=torch.int64, device="meta")
    graph = trace(lit_gpt.GPT(shape, 256), (tokens, tokens), optimizer=torch.optim.AdamW)
    n_adapters = 2 * 2 * (2048 * 8 + 8 * 2048)  # of queries and values
    of_layer = 3 * 2048 * 2049 + 2048 * 2049 + 2048 * 8193 + 8192 * 2049 + 2 * 2048
    n_frozen = 2 * 51200 * 2048 + 51200 + 2 * of_layer + 2 * 2048
    assert by_kind(graph.resident, "parameter") == 2 * (n_frozen + n_adapters)
    assert by_kind(graph.tensors, "gradient") == 2 * n_adapters
    assert (
        by_kind(graph.resident, "optimizer_state") == 2 * 2 * n_adapters + 4 * 4
    )  # and counts of steps


def by_kind(tensors, kind):
    return sum(tensor.size_bytes for tensor in tensors if tensor.kind == kind)


SHARDED = {
    "level": "model",
    "source": "torchtitan",
    "model": "Llama-3.1-8B",
    "gpu": "8xH100 96GB, FSDP8",
    "batch_per_gpu": 1,
    "seq": 128,
    "ckpt": "per-op SAC",
    "technique": "FSDP2 eager",
    "peak_GiB": 20.0,
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ckpt": "every other block"}, "ckpt is 'every other block'"),
        ({"ckpt": None}, "ckpt is None"),
        ({"gpu": "8xH100 96GB, FSDP4"}, "N cards that share parameters"),
        ({"gpu": "8xCard9, FSDP8"}, "no figures of card9"),
        ({"gpu": None}, "no figures of"),
        ({"model": "Llama-9"}, "shape of Llama-9"),
        ({"technique": "FSDP2"}, "not described here"),
        ({"seq": "8192"}, "seq is '8192'"),
        ({"batch_per_gpu": 0}, "batch_per_gpu is 0"),
        ({"peak_GiB": None}, "peak_GiB is None"),
    ],
)
def test_a_sharded_model_that_is_not_described_says_why(changed, reason):
    (result,) = compare_rows([{**SHARDED, **changed}])
    assert "predicted" not in result
    assert reason.lower() in result["reason"].lower()


TUNED = {
    "level": "model",
    "source": "meta-pytorch/torchtune README.md",
    "model": "Llama-3.2-1B full finetune",
    "gpu": "1xA100-80GB",
    "batch_per_gpu": 1,
    "seq": 128,
    "dtype": "bf16",
    "opt": "AdamW",
    "technique": "+packed",
    "peak_active_GiB": 10.0,
}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": "fp32"}, "dtype 'fp32'"),
        ({"opt": "Adafactor"}, "opt 'Adafactor'"),
        ({"technique": "+packed, AC"}, "technique '+packed, AC'"),
        ({"technique": ""}, "this set-up is not described"),
        ({"accumulation": 4}, "accumulation 4"),
        ({"ckpt": "full AC"}, "checkpointing 'full AC'"),
        ({"gpu": "8xA100-80GB"}, "one card"),
        ({"gpu": "1xCard 9"}, "no figures of 1xCard 9"),
        ({"model": "Llama-3.2-90B full finetune"}, "this set-up is not described"),
        ({"model": "Llama-3.2-1B DoRA full finetune"}, "this set-up is not described"),
        ({"source": "a blog"}, "this set-up is not described"),
        ({"liger": True}, "its setting 'liger'"),
        ({"peak_GB": 1.0}, "peak_active_GiB and peak_GB"),
        ({"peak_active_GiB": "10"}, "peak_active_GiB is '10'"),
        ({"tps": 0}, "tps is 0"),
        ({"seq": None}, "seq is None"),
    ],
)
def test_a_tuning_that_is_not_described_says_why(changed, reason):
    (result,) = compare_rows([{**TUNED, **changed}])
    assert "predicted" not in result
    assert reason in result["reason"]
    assert reason in shown(result)


@pytest.mark.exhaustive
def test_a_row_without_its_speed_or_in_another_unit_is_predicted_too():
    in_gb = {name: value for name, value in TUNED.items() if name != "peak_active_GiB"}
    one, other = compare_rows([TUNED, {**in_gb, "peak_GB": 10.0}])
    assert one["predicted"] * 2**30 == pytest.approx(other["predicted"] * 10**9)


@pytest.mark.exhaustive
def test_a_sharded_model_holds_what_is_counted_by_hand():
    """Parameters, gradients and AdamW's two states in float32 are a share each; a rank of twice as
    many holds half of it, with the same activations."""
    shares = []
    for n_ranks in (8, 16):
        (result,) = compare_rows([{**SHARDED, "gpu": f"{n_ranks}xH100 96GB, FSDP{n_ranks}"}])
        shares.append(result["predicted"])
    n_parameters = 8_030_261_248
    assert shares[0] - shares[1] == pytest.approx(16 * n_parameters / 16 / 2**30, rel=0.05)


@pytest.mark.slow
def test_a_rank_of_two_layers_holds_its_share():
    shape = {**_SHAPES["llama-3.1-8b"], "n_layers": 2, "n_tokens": _N_TOKENS}
    row = {**SHARDED, "seq": 1024}
    graph, schedule = torchtitan.step(row, shape, named("h100"))
    of_layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    n_parameters = 2 * of_layer + 2 * _N_TOKENS * 4096 + 4096
    returned = [graph.tensor_by_name[name] for name in graph.outputs]
    assert by_kind(graph.resident, "parameter") == 4 * n_parameters // 8
    assert by_kind(returned, "gradient") == 4 * n_parameters // 8
    assert by_kind(graph.resident, "optimizer_state") == 2 * 4 * n_parameters // 8
    simulation = simulate(graph, schedule)
    assert simulation.n_recomputed
    assert graph.resident_bytes < simulation.peak_bytes <= simulate_unplanned(graph).peak_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", ["models", "torchtitan"])
def test_the_peak_of_a_sharded_model_is_predicted(file):
    """With the results of products that its checkpoints keep and nothing reads."""
    rows = json.loads((DATA / f"{file}.json").read_text())["rows"]
    (result,) = compare_rows([row for row in rows if row.get("technique") == "FSDP2 eager"])
    assert abs(result["off"]) < 0.015


@pytest.mark.slow
def test_the_peak_of_a_whole_model_is_predicted():
    rows = json.loads((DATA / "models.json").read_text())["rows"]
    (result,) = compare_rows([row for row in rows if row.get("technique") == "+packed"])
    assert abs(result["off"]) < 0.015
    assert result["rate_share"] == pytest.approx(FITTED["a100"], abs=0.01)
    assert result["ratio"] == pytest.approx((LEAST_RATIO, LARGEST_RATIO), abs=0.01)
