"""Llama under FSDP2 without torch.compile, as torchtitan trained it in December 2024.

Parameters, their shards and AdamW's state are float32; blocks compute in bfloat16 and reduce
gradients in float32. Each block is wrapped in a checkpoint and then sharded; embedding, last norm
and head are in FSDP2's root group. The loss is computed from float32 logits; the logits are deleted
before the backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.published.errors import NotPredictedError
from graphs.capture import can_trace_absent
from graphs.costs import Roofline
from graphs.fsdp import MixedPrecision, Sharding
from graphs.graph import Graph
from graphs.hardware import Hardware
from graphs.trace import trace
from graphs.training_step import with_dropped_outputs
from solver.module_checkpointing import CheckpointRegion, plan_regions
from solver.module_checkpointing.regions import nodes_of
from solver.schedule import Schedule

_CHECKPOINTS = ("none", "full AC", "per-op SAC")
_EPS = 1e-5


def is_described(row: Mapping[str, Any]) -> bool:
    """Whether the row is of torchtitan with FSDP2 in eager mode."""
    text = f"{row.get('source')} {row.get('technique')}".lower()
    return "torchtitan" in text and "fsdp2 eager" in text


def n_ranks(row: Mapping[str, Any]) -> int:
    """The number of ranks by the row's "gpu", such as "8xH100 96GB HBM2e 500W, FSDP8".

    Raises NotPredictedError if it is not that of N cards with FSDP over all of them.
    """
    found = re.fullmatch(r"([0-9]+)x[^,]*, FSDP([0-9]+)", str(row.get("gpu")))
    if found is None or found.group(1) != found.group(2) or int(found.group(1)) < 2:
        raise NotPredictedError(f"{row.get('gpu')!r} is none of N cards that share parameters")
    return int(found.group(1))


def step(
    row: Mapping[str, Any], shape: Mapping[str, Any], hardware: Hardware
) -> tuple[Graph, Schedule]:
    """The step of one rank, and the schedule of the row's checkpointing.

    shape: arguments of `benchmarks.published.llama.Llama`.

    Raises NotPredictedError if checkpointing or "gpu" of the row are not known.
    """
    if row.get("ckpt") not in _CHECKPOINTS:
        raise NotPredictedError(f"ckpt is {row.get('ckpt')!r}; one of {', '.join(_CHECKPOINTS)}")
    ranks = n_ranks(row)
    model = _Model(shape, row["seq"])
    tokens = torch.empty(row["batch_per_gpu"], row["seq"], dtype=torch.int64, device="meta")
    blocks = tuple(f"layers.{index}" for index in range(shape["n_layers"]))
    # at that time PyTorch preferred FlashAttention to cuDNN's attention
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        graph = trace(
            model,
            (tokens, tokens),
            inputs=lambda batch: batch[0],
            loss=_loss,
            optimizer=torch.optim.AdamW,
            device=torch.device("cuda" if can_trace_absent() else "cpu"),
            costs=Roofline(hardware),
            fsdp=Sharding(
                n_ranks=ranks,
                groups=blocks,
                mp_policy=MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32"),
                link="nvlink4",
            ),
        )
    is_selective = row["ckpt"] == "per-op SAC"
    checkpointed = () if row["ckpt"] == "none" else blocks
    graph = with_dropped_outputs(graph, graph.returned)
    regions = [_region(graph, f"{path}.block", is_selective=is_selective) for path in checkpointed]
    return graph, plan_regions(graph, regions).schedule


def _region(graph: Graph, path: str, *, is_selective: bool) -> CheckpointRegion:
    """The checkpoint around one block.

    is_selective: selective checkpointing per op: the results of attention and of every second
        matrix product are saved. The policy names kinds of operators, so the result of the block's
        last product is saved, too, though nothing reads it.
    """
    names = nodes_of(graph, path)
    ops = {name: graph.node_by_name[name].op for name in names}
    products = [name for name in names if ops[name].startswith("aten.mm.")]
    saved = {*products[::2], *(name for name in names if "dot_product" in ops[name])}
    kept = frozenset(saved if is_selective else ())
    return CheckpointRegion(names, (path,), kept, keeps_unread=True)


def _loss(logits: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(0, 1))


def _linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False, device="meta")


class _Norm(nn.Module):
    """nn.RMSNorm as PyTorch computed it then: in float32, by single operators."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
        return wide.type_as(x) * self.weight


class _Attention(nn.Module):
    def __init__(self, h: int, a: int, n_kv: int) -> None:
        super().__init__()
        self.size, self.n_shared = h // a, a // n_kv
        self.q, self.k, self.v = (_linear(h, n * self.size) for n in (a, n_kv, n_kv))
        self.o = _linear(h, h)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.view(b, t, -1, self.size) for each in (q, k, v))
        q, k = _rotated(q, angles), _rotated(k, angles)
        keys, values = self.for_all_heads(k), self.for_all_heads(v)
        q, k, v = (each.transpose(1, 2) for each in (q, keys, values))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).contiguous().view(b, t, h))

    def for_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        b, t, n_kv, size = x.shape
        shared = x[:, :, :, None, :].expand(b, t, n_kv, self.n_shared, size)
        return shared.reshape(b, t, n_kv * self.n_shared, size)


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


class _Block(nn.Module):
    def __init__(self, h: int, a: int, n_kv: int, i: int) -> None:
        super().__init__()
        self.attention, self.before_attention = _Attention(h, a, n_kv), _Norm(h)
        self.gate, self.up, self.down = _linear(h, i), _linear(h, i), _linear(i, h)
        self.before_mlp = _Norm(h)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), angles)
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class _Checkpointed(nn.Module):
    """The wrapper for the checkpoint around a block; FSDP2 shards the wrapper."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return self.block(x, angles)


class _Model(nn.Module):
    def __init__(self, shape: Mapping[str, Any], length: int) -> None:
        super().__init__()
        h, a, n_kv, i = (shape[name] for name in ("h", "a", "n_kv", "i"))
        self.embedding = nn.Embedding(shape["n_tokens"], h, device="meta")
        self.layers = nn.ModuleList(
            _Checkpointed(_Block(h, a, n_kv, i)) for _ in range(shape["n_layers"])
        )
        self.norm, self.head = _Norm(h), _linear(h, shape["n_tokens"])
        angles = torch.empty(length, h // a // 2, dtype=torch.complex64, device="meta")
        self.register_buffer("angles", angles)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))
