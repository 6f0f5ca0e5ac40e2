"""Small models for the tests of tracing and running, each with some difficulty."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class NormAndDropout(nn.Module):
    """Batch norm (buffers must change only once), dropout; returns a scalar loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(16, 8)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        logits = self.second(hidden) + self.shift
        return {"loss": F.mse_loss(logits, target), "logits": logits.view(-1, 2, 4)}

    @staticmethod
    def batch() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            "x": torch.randn(6, 8, generator=generator),
            "target": torch.randn(6, 8, generator=generator),
        }


class TiedLanguageModel(nn.Module):
    """Tied embedding and head, dropout, attention; returns only the loss."""

    def __init__(self, n_layers: int = 2, width: int = 16, vocabulary: int = 30) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(n_layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randint(0, 30, (3, 10), generator=torch.Generator().manual_seed(0))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(
            q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=True
        )
        return x + self.drop(F.gelu(self.out(y.squeeze(1))))


class SharedGradients(nn.Module):
    """Gradients that are expanded tensors, one tensor for two parameters, or parts of a larger
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(6, 8))
        self.right = nn.Parameter(torch.randn(6, 8))
        self.parts = nn.ParameterList(torch.randn(n, 8) for n in (2, 3))
        self.offset = nn.Parameter(torch.zeros(50, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x + (self.left + self.right))
        out = hidden @ torch.cat(list(self.parts)).t()
        return out.square().mean() + self.offset.sum()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    """PyTorch's own encoder layer, with dropout on tensors that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.layer(x).transpose(1, 2)).square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """nn.GRU, which keeps its weights in a list beside the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0]).square().mean()

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class Classifier(nn.Module):
    """Returns logits; its caller computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh()
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        del label
        return self.head(self.layers(x))

    @staticmethod
    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output, batch[1])

    @staticmethod
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(7, 8, generator=generator), torch.arange(7) % 5


class ConvNet(nn.Module):
    """Convolutions, in-place activations, a skip, pooling."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.body:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.zeros(len(x), dtype=torch.long))

    @staticmethod
    def batch() -> torch.Tensor:
        return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class LanguageHead(nn.Module):
    """Logits that are much larger than everything else, and their cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1024, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), y)
