"""Whole training set-ups: those that are predicted, and the rest with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.published import lit_gpt
from benchmarks.published.errors import NotPredictedError
from benchmarks.published.llama import Llama
from benchmarks.published.shares import ratio_range
from graphs.capture import can_trace_absent
from graphs.costs import Roofline
from graphs.hardware import Hardware, named
from graphs.trace import trace
from solver.plan_analysis import split_s
from solver.schedule import simulate_unplanned

_REASONS = {
    r"fp8|float8|nvfp4|bnb|\bnf4": "8-bit and 4-bit products run in kernels that are not traced",
    r"8-bit": "the optimizer's state is 8-bit, of another library",
    r"offload": "activations are moved to the host",
    r"compil|chunked ce|optimizer in backward": "torch.compile: Inductor's buffers are its own",
    r"unpacked": "lengths of the batches are those of the data set and not given",
    r"model in the pr": "the model is not described",
    r"fsdp": "torchtitan's selective checkpointing under FSDP2 is not described here",
}
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.2-1b": {"n_layers": 16, "h": 2048, "a": 32, "n_kv": 8, "i": 8192, "tied": True},
    "llama-3.2-3b": {"n_layers": 28, "h": 3072, "a": 24, "n_kv": 8, "i": 8192, "tied": True},
    "llama-3.1-8b": {"n_layers": 32, "h": 4096, "a": 32, "n_kv": 8, "i": 14336, "tied": False},
}
"""Meta's configurations; all have 128 256 tokens."""
ModelStep: TypeAlias = tuple[float, float, float | None, tuple[float, float] | None]
_UNITS = {"GiB": 2**30, "GB": 10**9}


def model_step(row: Mapping[str, Any]) -> ModelStep:
    """Predicted and measured peak, in the row's unit, the share of the card's peak rates that the
    measured speed is, and the range of `ratio_range` (None: not measured).

    Predicted are steps on one card, eager, without checkpointing and with AdamW: full fine-tunings
    of Llama 3 in bfloat16 with packed sequences, as torchtune's recipe for a single device runs
    them, and litgpt's with low-rank adapters, at the length of the longest sample.

    Raises NotPredictedError.
    """
    text = " ".join(str(row.get(key, "")) for key in ("technique", "model", "gpu")).lower()
    for pattern, reason in _REASONS.items():
        if re.search(pattern, text):
            raise NotPredictedError(reason)
    if "seq" not in row or "batch_per_gpu" not in row:
        raise NotPredictedError("batch size and length are not given")
    field = next(name for name in row if name.startswith("peak"))
    tokens = torch.empty(row["batch_per_gpu"], row["seq"], dtype=torch.int64, device="meta")
    graph = trace(
        _model(row),
        (tokens, tokens),
        optimizer=torch.optim.AdamW,
        device=torch.device("cuda" if can_trace_absent() else "cpu"),
        costs=Roofline(_card(row["gpu"])),
    )
    unit = _UNITS[field.rpartition("_")[2]]
    step_s = tokens.numel() / row["tps"] if "tps" in row else None
    peak = simulate_unplanned(graph).peak_bytes / unit
    if step_s is None:
        return peak, row[field], None, None
    ratio = ratio_range(*split_s(graph.nodes), step_s)
    return peak, row[field], graph.baseline_time_s / step_s, ratio


def _model(row: Mapping[str, Any]) -> nn.Module:
    """It returns the loss first, and takes tokens and targets."""
    name, recipe = str(row.get("model", "")).lower(), str(row.get("source", "")).lower()
    if "full finetune" in name:
        for model, sizes in _SHAPES.items():
            if model in name:
                return Llama(**sizes, n_tokens=128256, length=row["seq"])
    if "lora r=8" in recipe and "litgpt" in recipe:
        for model, shape in lit_gpt.SHAPES.items():
            if model in name:
                return lit_gpt.GPT(shape, row["seq"])
    raise NotPredictedError("this set-up is not described here")


def _card(gpu: str) -> Hardware:
    """Of a name such as "1xA100-80GB"."""
    name = gpu.lower().removeprefix("1x")
    try:
        return named(f"rtx{name}" if name.isdigit() else name)
    except ValueError:
        raise NotPredictedError(f"no figures of {gpu} are known") from None
