"""GPT-2 XL as the layers of a pipeline: 48 blocks, width 1600; micro-batch 2 x 1024, fp32, AdamW.

    solve --budget 16GB --device a100 --pipeline 4 --microbatches 8 examples/gpt2_layers.py

Embedding and head are separate layers and do not share their weight: layers that share parameters
would have to be in one stage.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gpt2 import Block  # examples/gpt2.py
from torch import nn


class Embedding(nn.Module):
    def __init__(self, n_tokens: int, max_length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(n_tokens, width)
        self.position = nn.Embedding(max_length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


def get_model(
    n_layers: int = 48,
    width: int = 1600,
    n_heads: int = 25,
    n_tokens: int = 50257,
    max_length: int = 1024,
) -> nn.Sequential:
    blocks = (Block(width, n_heads, dropout=0.0) for _ in range(n_layers))
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, n_tokens, bias=False))
    return nn.Sequential(Embedding(n_tokens, max_length, width), *blocks, head)


def get_batch(
    batch_size: int = 2, seq_length: int = 1024, n_tokens: int = 50257
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(n_tokens, (batch_size, seq_length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def get_inputs(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return batch[0]


def get_loss(logits: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
