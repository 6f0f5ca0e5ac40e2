"""Predict peaks and times of whole training set-ups, or say why a set-up cannot be predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.published import lit_gpt, torchtitan
from benchmarks.published.errors import NotPredictedError
from benchmarks.published.llama import Llama
from benchmarks.published.rows import number
from benchmarks.published.shares import ratio_range
from graphs.capture import can_trace_absent
from graphs.costs import Roofline
from graphs.hardware import Hardware, named
from graphs.trace import trace
from solver.plan_analysis import split_s
from solver.schedule import reserved, simulate, simulate_unplanned

_REASONS = {
    r"fp8|float8|nvfp4|bnb|\bnf4": "8-bit and 4-bit products run in kernels that are not traced",
    r"8-bit": "the optimizer's state is 8-bit, of another library",
    r"offload": "activations are moved to the host",
    r"compil|chunked ce|optimizer in backward": "torch.compile: Inductor's buffers are its own",
    r"unpacked": "lengths of the batches are those of the data set and not given",
    r"model in the pr": "the model is not described",
    r"^bf16 ": "neither its checkpointing nor whether it is compiled is stated",
}
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {"n_layers": 16, "h": 2048, "a": 32, "n_kv": 8, "i": 8192, "tied": True},
    "llama-3.2-3b": {"n_layers": 28, "h": 3072, "a": 24, "n_kv": 8, "i": 8192, "tied": True},
    "llama-3.1-8b": {"n_layers": 32, "h": 4096, "a": 32, "n_kv": 8, "i": 14336, "tied": False},
    "llama-3-8b": {"n_layers": 32, "h": 4096, "a": 32, "n_kv": 8, "i": 14336, "tied": False},
}
"""Meta's configurations; all have a vocabulary of 128 256 tokens."""
_N_TOKENS = 128256
ModelStep: TypeAlias = tuple[float, float, float | None, tuple[float, float] | None]
_UNITS = {"GiB": 2**30, "GB": 10**9}
_ALLOWED = {
    "dtype": (None, "bf16"),
    "opt": (None, "AdamW", "AdamW fp32 master, bf16 mp"),
    "technique": (None, "", "packed", "+packed", "FSDP2 eager"),
    "accumulation": (None, 1),
}
"""Optional settings, with the values for which a prediction is possible."""
_FIELDS = {
    *("level", "source", "model", "gpu", "batch_per_gpu", "seq", "ckpt", *_ALLOWED),
    *("tps", "tps_per_gpu", "min_per_1k_iterations", "step_s", "time", "note"),
}


def model_step(row: Mapping[str, Any]) -> ModelStep:
    """The predicted and the measured peak in the row's unit, the share of the card's peak rates at
    which the measured step ran, and the range of `ratio_range` (both None: no measured time, and
    the range also for several cards).

    These eager steps with AdamW can be predicted:
    - on one card, without checkpointing: full fine-tuning of Llama 3 in bfloat16 with packed
      sequences, by torchtune's recipe for a single device; litgpt's fine-tuning with low-rank
      adapters, at the length of the longest sample;
    - torchtitan's training of Llama 3 under FSDP2, whose peak is that of reserved memory.

    Raises NotPredictedError for any other row.
    """
    text = " ".join(str(row.get(key, "")) for key in ("technique", "model", "gpu")).lower()
    for pattern, reason in _REASONS.items():
        if re.search(pattern, text):
            raise NotPredictedError(reason)
    if "seq" not in row or "batch_per_gpu" not in row:
        raise NotPredictedError("batch size and length are not given")
    for name in ("seq", "batch_per_gpu"):
        if not isinstance(row[name], int) or isinstance(row[name], bool) or row[name] < 1:
            raise NotPredictedError(f"{name} is {row[name]!r}; a whole number above 0")
    for name, known in _ALLOWED.items():
        if row.get(name) not in known:
            raise NotPredictedError(f"{name} {row[name]!r} is not described here")
    peaks = [name for name in row if str(name).startswith("peak")]
    if others := [name for name in row if name not in _FIELDS and name not in peaks]:
        raise NotPredictedError(f"its setting {others[0]!r} is not described here")
    if len(peaks) > 1:
        raise NotPredictedError(f"{' and '.join(peaks)}: one measured peak is needed")
    field = peaks[0] if peaks else "peak_GiB"
    measured, unit = number(row, field), _UNITS.get(field.rpartition("_")[2])
    if unit is None:
        raise NotPredictedError(f"{field}: its unit is none of {', '.join(_UNITS)}")
    if torchtitan.is_described(row):
        return _rank_step(row, measured, unit)
    if "fsdp" in text:
        raise NotPredictedError("its checkpointing and recipe are not described here")
    return _one_card_step(row, measured, unit)


def _one_card_step(row: Mapping[str, Any], measured: float, unit: int) -> ModelStep:
    """Predict a step on one card, by the peak of allocated memory."""
    if not re.match(r"1x[^x]", str(row.get("gpu"))):
        raise NotPredictedError(f"gpu is {row.get('gpu')!r}; one card, such as '1xA100-80GB'")
    if row.get("ckpt") not in (None, "none"):
        raise NotPredictedError(f"checkpointing {row['ckpt']!r} on one card is not described here")
    tokens = torch.empty(row["batch_per_gpu"], row["seq"], dtype=torch.int64, device="meta")
    step_s = tokens.numel() / number(row, "tps") if "tps" in row else None
    graph = trace(
        _model_of(row),
        (tokens, tokens),
        optimizer=torch.optim.AdamW,
        device=torch.device("cuda" if can_trace_absent() else "cpu"),
        costs=Roofline(_hardware_of(row["gpu"])),
    )
    peak = simulate_unplanned(graph).peak_bytes / unit
    if step_s is None:
        return peak, measured, None, None
    ratio = ratio_range(*split_s(graph.nodes), step_s)
    return peak, measured, graph.baseline_time_s / step_s, ratio


def _rank_step(row: Mapping[str, Any], measured: float, unit: int) -> ModelStep:
    """Predict a rank of torchtitan, whose log has the peak of reserved memory."""
    name = str(row.get("model", "")).lower()
    if name not in _SHAPES:
        raise NotPredictedError(f"the shape of {row.get('model')} is not described here")
    shape = {**_SHAPES[name], "n_tokens": _N_TOKENS}
    n_tokens = row["seq"] * row["batch_per_gpu"]
    step_s = n_tokens / number(row, "tps_per_gpu") if "tps_per_gpu" in row else None
    graph, schedule = torchtitan.step(row, shape, _hardware_of(_card_model(str(row.get("gpu")))))
    peak = reserved(graph, schedule, expandable=False).reserved_bytes / unit
    if step_s is None:
        return peak, measured, None, None
    return peak, measured, simulate(graph, schedule).time_s / step_s, None


def _model_of(row: Mapping[str, Any]) -> nn.Module:
    """The model of a row, which takes tokens and targets and returns the loss first."""
    name, recipe = str(row.get("model", "")).lower(), str(row.get("source", "")).lower()
    technique = str(row.get("technique", ""))
    if "torchtune" in recipe and "packed" in technique:
        sizes = _SHAPES.get(name.removesuffix(" full finetune"))
        if sizes is not None and name.endswith(" full finetune"):
            return Llama(**sizes, n_tokens=_N_TOKENS, length=row["seq"])
    if "lora r=8" in recipe and "litgpt" in recipe and "bf16-true" in recipe and not technique:
        for model, shape in lit_gpt.SHAPES.items():
            if name.startswith(f"{model} ") and name.endswith(" lora"):
                return lit_gpt.GPT(shape, row["seq"])
    raise NotPredictedError("this set-up is not described here")


def _card_model(gpu: str) -> str:
    """The card's model: "H100" for "8xH100 96GB HBM2e 500W, FSDP8"."""
    return re.split(r"[ ,]", gpu.partition("x")[2])[0]


def _hardware_of(gpu: object) -> Hardware:
    """The hardware for a name such as "1xA100-80GB"."""
    name = str(gpu).lower().removeprefix("1x")
    try:
        return named(f"rtx{name}" if name.isdigit() else name)
    except ValueError:
        raise NotPredictedError(f"no figures of {gpu} are known") from None
