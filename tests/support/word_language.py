"""The language models of PyTorch's example `word_language_model`.

The recurrent models return their hidden state beside the scores. The training loop detaches it for
the next batch, so it gets no gradient. The Transformer makes its causal mask in the first call and
keeps it. Tokens have the shape (steps, sequences); scores are log-probabilities of every token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LAYERS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class RecurrentLanguageModel(nn.Module):
    """Layers of `nn.LSTM`, `nn.GRU` or `nn.RNN`; kind: one of LAYERS."""

    def __init__(self, kind: str, *, n_tokens: int, width: int, n_layers: int = 2) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.embed = nn.Embedding(n_tokens, width)
        self.recurrent = LAYERS[kind](width, width, n_layers, dropout=0.2)
        self.head = nn.Linear(width, n_tokens)

    def forward(self, tokens: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        made, hidden = self.recurrent(self.drop(self.embed(tokens)), hidden)
        scores = self.head(self.drop(made))
        return F.log_softmax(scores.flatten(0, 1), dim=-1), hidden

    def start(self, n_rows: int) -> Any:
        """The hidden state before the first batch."""
        zeros = torch.zeros(self.recurrent.num_layers, n_rows, self.recurrent.hidden_size)
        return (zeros, zeros.clone()) if isinstance(self.recurrent, nn.LSTM) else zeros


class CellLanguageModel(nn.Module):
    """LSTM cells in a loop, with the interface of `RecurrentLanguageModel`."""

    def __init__(self, *, n_tokens: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_tokens, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, n_tokens)

    def forward(self, tokens: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        made = []
        for step in self.embed(tokens):
            hidden = self.cell(step, hidden)
            made.append(hidden[0])
        scores = self.head(torch.stack(made))
        return F.log_softmax(scores.flatten(0, 1), dim=-1), hidden

    def start(self, n_rows: int) -> Any:
        zeros = torch.zeros(n_rows, self.cell.hidden_size)
        return zeros, zeros.clone()


class TransformerLanguageModel(nn.Module):
    """nn.TransformerEncoder with sinusoidal positions and a causal mask that it keeps."""

    def __init__(self, *, n_tokens: int, width: int, n_heads: int = 2, n_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_tokens, width)
        self.width = width
        angles = torch.arange(500)[:, None] * torch.exp(
            torch.arange(0, width, 2) * (-math.log(10000.0) / width)
        )
        positions = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("positions", positions[:, None])
        layer = nn.TransformerEncoderLayer(width, n_heads, 2 * width)
        self.encoder = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, n_tokens)
        self.src_mask: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.src_mask is None or self.src_mask.size(0) != len(tokens):
            mask = torch.ones(len(tokens), len(tokens)).tril().log()
            self.src_mask = mask.to(tokens.device)
        embedded = self.embed(tokens) * math.sqrt(self.width) + self.positions[: len(tokens)]
        scores = self.head(self.encoder(embedded, mask=self.src_mask))
        return F.log_softmax(scores, dim=-1)


def detached(hidden: Any) -> Any:
    """The hidden state for the next batch, without its history."""
    if isinstance(hidden, torch.Tensor):
        return hidden.detach()
    return tuple(map(detached, hidden))
