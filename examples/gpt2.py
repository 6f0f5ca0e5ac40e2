"""GPT-2 small (Radford et al. 2019): 12 blocks, width 768, batch 8 x 1024 tokens, fp32, AdamW.

    solve --budget 8GB examples/gpt2.py

Written as people train it today: fused attention, tied embedding and head, no dropout in
pre-training. Forward returns only the loss: logits held by the caller would cost 1.6 GB.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_heads, width // self.n_heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")))


class GPT2(nn.Module):
    def __init__(
        self,
        n_layers: int,
        width: int,
        n_heads: int,
        n_tokens: int,
        max_length: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(n_tokens, width)
        self.position_embedding = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, n_heads, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_tokens, bias=False)
        self.head.weight = self.token_embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_model(
    n_layers: int = 12,
    width: int = 768,
    n_heads: int = 12,
    n_tokens: int = 50257,
    max_length: int = 1024,
    dropout: float = 0.0,
) -> nn.Module:
    return GPT2(n_layers, width, n_heads, n_tokens, max_length, dropout)


def get_batch(
    batch_size: int = 8, seq_length: int = 1024, n_tokens: int = 50257
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(n_tokens, (batch_size, seq_length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
