"""A language model of LSTM cells (Hochreiter & Schmidhuber 1997), unrolled over 200 steps.

    solve --budget 200MB examples/lstm.py
    solve --budget 400MB --seq-length 500 examples/lstm.py

nn.LSTM is a single opaque operator, inside which nothing can be kept or recomputed by itself. A
loop of cells can be scheduled step by step: such chains are where checkpointing began.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LSTM(nn.Module):
    def __init__(self, *, n_tokens: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(n_tokens, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, n_tokens)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = memory = torch.zeros(len(tokens), self.width, device=tokens.device)
        loss = torch.zeros((), device=tokens.device)
        for step in range(tokens.shape[1]):
            hidden, memory = self.cell(self.embedding(tokens[:, step]), (hidden, memory))
            loss = loss + F.cross_entropy(self.head(hidden), targets[:, step])
        return loss / tokens.shape[1]


def get_model(n_tokens: int = 1000, width: int = 512) -> nn.Module:
    return LSTM(n_tokens=n_tokens, width=width)


def get_batch(
    batch_size: int = 64, seq_length: int = 200, n_tokens: int = 1000
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(n_tokens, (batch_size, seq_length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
