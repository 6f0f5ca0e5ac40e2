"""GPT with low-rank adapters (LoRA) on the meta device, as litgpt fine-tuned it in October 2023.

Weights are bfloat16 and frozen. Queries and values have adapters of rank 8. The head and its loss
run in chunks of 128 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.published.llama import BF16, Norm, linear, rotated

_RANK = 8
_SCALE = 2.0
_DROPOUT = 0.05
_CHUNK = 128


@dataclass(frozen=True)
class Shape:
    """Shape of a model.

    h: width. i: inner width of the MLP. n_tokens: size of the vocabulary.
    n_rotated: dimensions of each head with rotary positions.
    gated: Llama's blocks: a gated MLP after attention, root-mean-square norms, no biases. Else
        GPT-NeoX's: MLP parallel to attention, layer norms, biases.
    shared_norm: attention and MLP read the output of the same norm.
    head_bias: the head has a bias.
    """

    n_layers: int
    h: int
    n_heads: int
    i: int
    n_tokens: int
    n_rotated: int
    gated: bool = False
    shared_norm: bool = False
    head_bias: bool = False


SHAPES = {
    "phi-1.5": Shape(24, 2048, 32, 8192, 51200, 32, shared_norm=True, head_bias=True),
    "stablelm alpha": Shape(16, 4096, 32, 16384, 50688, 32),
    "llama-2 7b": Shape(32, 4096, 32, 11008, 32000, 128, gated=True),
    "llama-2 13b": Shape(40, 5120, 40, 13824, 32000, 128, gated=True),
}


class QueryKeyValue(nn.Module):
    """One product for queries, keys and values, and the adapter, which in each call is padded with
    zeros for the keys."""

    def __init__(self, h: int, *, bias: bool) -> None:
        super().__init__()
        self.qkv = linear(h, 3 * h, bias=bias)
        self.down = nn.Parameter(torch.empty(2 * _RANK, h, dtype=BF16, device="meta"))
        self.up = nn.Parameter(torch.empty(2 * h, _RANK, dtype=BF16, device="meta"))
        index = torch.cat((torch.arange(h), torch.arange(2 * h, 3 * h)))
        self.register_buffer("index", index.to("meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.qkv(x)
        low = F.linear(F.dropout(x, _DROPOUT, self.training), self.down)
        high = F.conv1d(low.transpose(-2, -1), self.up[..., None], groups=2).transpose(-2, -1)
        result += self.padded_for_keys(high) * _SCALE
        return result

    def padded_for_keys(self, high: torch.Tensor) -> torch.Tensor:
        high = high.transpose(0, 1)
        rows = high.new_zeros(*high.shape[:-1], self.qkv.out_features).flatten(0, -2)
        rows = rows.index_copy(1, self.index, high.reshape(-1, high.shape[-1]))
        return rows.view(*high.shape[:-1], -1).transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_heads, self.n_rotated = shape.n_heads, shape.n_rotated
        self.projected = QueryKeyValue(shape.h, bias=not shape.gated)
        self.out = linear(shape.h, shape.h, bias=not shape.gated)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        qkv = self.projected(x).view(b, t, self.n_heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (each.reshape(b, self.n_heads, t, -1) for each in qkv.split(1, dim=2))
        q, k = (self.with_positions(each, cos, sin) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, h))

    def with_positions(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        n = self.n_rotated
        rotated_part = rotated(x[..., :n], cos, sin).to(x.dtype)
        return torch.cat((rotated_part, x[..., n:]), dim=-1)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = not shape.gated
        self.up = linear(shape.h, shape.i, bias=bias)
        self.gate = linear(shape.h, shape.i, bias=bias) if shape.gated else None
        self.down = linear(shape.i, shape.h, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_sequential = shape.gated
        self.norm_1 = _norm(shape)
        self.norm_2 = None if shape.shared_norm else _norm(shape)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        attended = self.attention(normed, cos, sin)
        if self.is_sequential:
            assert self.norm_2 is not None
            x = attended + x
            return self.mlp(self.norm_2(x)) + x
        mlp_input = normed if self.norm_2 is None else self.norm_2(x)
        return self.mlp(mlp_input) + attended + x


def _norm(shape: Shape) -> nn.Module:
    return Norm(shape.h) if shape.gated else nn.LayerNorm(shape.h, dtype=BF16, device="meta")


class GPT(nn.Module):
    """Returns the loss and the logits. A variable of the training loop keeps the logits alive
    during the backward pass; Fabric's half precision returns them in float32."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.n_tokens, shape.h, dtype=BF16, device="meta")
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = _norm(shape)
        self.head = linear(shape.h, shape.n_tokens, bias=shape.head_bias)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(length, shape.n_rotated, device="meta"))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".projected.up", ".projected.down")))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = [self.head(each) for each in self.norm(x).split(_CHUNK, dim=1)]
        logits = [each.float() for each in logits]
        logits[-1] = logits[-1][..., :-1, :]
        losses = [
            F.cross_entropy(each.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="none")
            for each, target in zip(logits, targets[..., 1:].split(_CHUNK, dim=1), strict=True)
        ]
        return torch.cat(losses).mean(), *logits
