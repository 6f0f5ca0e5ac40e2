"""Llama in bfloat16 on the meta device, written as in the transformers library and torchtune."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BF16 = torch.bfloat16


def linear(n_in: int, n_out: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=bias, dtype=BF16, device="meta")


class Norm(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(h, dtype=BF16, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class LlamaLayer(nn.Module):
    """A layer as the transformers library writes it, with fused attention.

    h: width. a: heads. n_kv: heads of keys and values. i: inner width of the MLP.
    """

    def __init__(self, h: int, a: int, n_kv: int, i: int) -> None:
        super().__init__()
        self.a, self.n_kv, self.head = a, n_kv, h // a
        self.before_attention, self.before_mlp = Norm(h), Norm(h)
        n = n_kv * self.head
        self.q, self.o = linear(h, h, bias=False), linear(h, h, bias=False)
        self.k, self.v = linear(h, n, bias=False), linear(h, n, bias=False)
        self.gate, self.up = linear(h, i, bias=False), linear(h, i, bias=False)
        self.down = linear(i, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        y = self.before_attention(x)
        q, k, v = (
            project(y).view(b, s, -1, self.head).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = (rotated(each, cos, sin) for each in (q, k))
        k, v = (self.for_all_heads(each) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, h))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def for_all_heads(self, x: torch.Tensor) -> torch.Tensor:
        b, n_kv, s, head = x.shape
        shared = x[:, :, None].expand(b, n_kv, self.a // n_kv, s, head)
        return shared.reshape(b, self.a, s, head)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Returns the loss of float32 logits. If `tied`, the head uses the embedding's weight."""

    def __init__(
        self,
        *,
        n_layers: int,
        h: int,
        a: int,
        n_kv: int,
        i: int,
        n_tokens: int,
        length: int,
        tied: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, h, dtype=BF16, device="meta")
        self.layers = nn.ModuleList(LlamaLayer(h, a, n_kv, i) for _ in range(n_layers))
        self.norm = Norm(h)
        self.head = self.embedding if tied else linear(h, n_tokens, bias=False)
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(1, length, h // a, dtype=BF16, device="meta"))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        logits = F.linear(self.norm(x), self.head.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
