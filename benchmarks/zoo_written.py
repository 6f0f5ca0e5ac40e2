"""Models written out here: nets of the literature that no library has small, and odd shapes.

The sizes are such that activations take more than parameters and a step takes about a second at
most on one core.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

N_CLASSES = 10


def _images(n_images: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n_images, 3, size, size), torch.arange(n_images) % N_CLASSES


class _Bottleneck(nn.Module):
    """Pre-activation bottleneck of He et al. 2016, Identity Mappings in Deep Residual Networks."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (n_in, width, width))
        self.reduce = nn.Conv2d(n_in, width, 1, bias=False)
        self.convolve = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.expand = nn.Conv2d(width, n_out, 1, bias=False)
        changes = stride > 1 or n_in != n_out
        self.skip = nn.Conv2d(n_in, n_out, 1, stride, bias=False) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.norms
        y = F.relu(first(x), inplace=True)
        skip = x if self.skip is None else self.skip(y)
        y = self.convolve(F.relu(second(self.reduce(y)), inplace=True))
        return skip + self.expand(F.relu(third(y), inplace=True))


class DeepResNet(nn.Module):
    """ResNet-(9 n + 2) for small images; n = 111 is ResNet-1001."""

    def __init__(self, n_blocks: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        n_in = width
        for stage in range(3):
            for block in range(n_blocks):
                stride = 2 if stage and not block else 1
                blocks.append(_Bottleneck(n_in, width << stage, stride))
                n_in = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm2d(n_in)
        self.head = nn.Linear(n_in, N_CLASSES)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = F.relu(self.norm(x)).mean((2, 3))
        return F.cross_entropy(self.head(x), label)


def resnet_1001() -> tuple[nn.Module, Any]:
    return DeepResNet(n_blocks=111, width=2), _images(2, 16)


class Vgg(nn.Module):
    """Simonyan & Zisserman 2015, with in-place activations and dropout in the head."""

    def __init__(self, widths: Sequence[Sequence[int]], image_size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for stage in widths:
            for width in stage:
                layers += [nn.Conv2d(n_in, width, 3, padding=1), nn.ReLU(inplace=True)]
                n_in = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side = image_size >> len(widths)
        self.classifier = nn.Sequential(
            nn.Linear(n_in * side * side, 64),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(64, N_CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def vgg() -> tuple[nn.Module, Any]:
    return Vgg([(16, 16), (32, 32), (48, 48)], image_size=32), _images(8, 32)


def first_of(batch: Any) -> Any:
    return batch[0]


def classification_loss(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


class _Double(nn.Sequential):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(
            nn.Conv2d(n_in, n_out, 3, padding=1),
            nn.GroupNorm(4, n_out),
            nn.SiLU(),
            nn.Conv2d(n_out, n_out, 3, padding=1),
            nn.GroupNorm(4, n_out),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Long skips: what the way down makes, the way up reads (Ronneberger et al. 2015)."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        ins = [3, *widths[:-1]]
        self.down = nn.ModuleList(_Double(a, b) for a, b in zip(ins, widths, strict=True))
        pairs = list(itertools.pairwise(widths))[::-1]
        self.raised = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(_Double(2 * a, a) for a, _ in pairs)
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for raised, block, skip in zip(self.raised, self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([raised(x), skip], 1))
        return F.binary_cross_entropy_with_logits(self.head(x), target)


def unet() -> tuple[nn.Module, Any]:
    return UNet([8, 16, 32]), (torch.randn(2, 3, 64, 64), torch.rand(2, 1, 64, 64).round())


class _DenseLayer(nn.Module):
    def __init__(self, n_in: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(n_in)
        self.conv = nn.Conv2d(n_in, growth, 3, padding=1, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return self.drop(self.conv(F.relu(self.norm(torch.cat(parts, 1)))))


class DenseNet(nn.Module):
    """Every layer reads all before it in its block (Huang et al. 2017)."""

    def __init__(self, n_layers: Sequence[int], growth: int) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for count in n_layers:
            self.blocks.append(
                nn.ModuleList(_DenseLayer(width + i * growth, growth) for i in range(count))
            )
            width += count * growth
            self.transitions.append(nn.Conv2d(width, width // 2, 1))
            width //= 2
        self.head = nn.Linear(width, N_CLASSES)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            parts = [x]
            for layer in block:
                parts.append(layer(parts))
            x = F.avg_pool2d(transition(torch.cat(parts, 1)), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


def densenet() -> tuple[nn.Module, Any]:
    return DenseNet([4, 5, 4], growth=8), _images(4, 32)


class Recurrent(nn.Module):
    """Cells in a loop over the sequence; predicts the next token at each step."""

    def __init__(self, cell: nn.Module, width: int, n_tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_tokens, width)
        self.cell = cell
        self.head = nn.Linear(width, n_tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(tokens)
        state: Any = None
        hidden = []
        for step in range(tokens.shape[1]):
            state = self.cell(embedded[:, step], state)
            hidden.append(state[0] if isinstance(state, tuple) else state)
        logits = self.head(torch.stack(hidden, 1))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def lstm_1000() -> tuple[nn.Module, Any]:
    return Recurrent(nn.LSTMCell(16, 16), 16, 20), torch.randint(0, 20, (8, 1000))


def gru_1000() -> tuple[nn.Module, Any]:
    return Recurrent(nn.GRUCell(16, 16), 16, 20), torch.randint(0, 20, (8, 1000))


class GraphNet(nn.Module):
    """Messages along edges, summed at their targets, with a residual (Gilmer et al. 2017)."""

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        self.encode = nn.Linear(8, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(n_layers))
        self.updates = nn.ModuleList(nn.GRUCell(width, width) for _ in range(n_layers))
        self.head = nn.Linear(width, 1)

    def forward(
        self, nodes: torch.Tensor, *, edges: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        x = self.encode(nodes)
        source, goal = edges
        degree = torch.zeros(len(nodes)).index_add(0, goal, torch.ones(len(goal))).clamp(min=1)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(torch.cat([x[source], x[goal]], 1)))
            sent = F.dropout(sent, 0.1, self.training)
            received = torch.zeros_like(x).scatter_add(0, goal[:, None].expand_as(sent), sent)
            x = update(received / degree[:, None], x)
        prediction = self.head(x)
        return {"loss": F.mse_loss(prediction, target), "prediction": prediction}


def graph_network() -> tuple[nn.Module, Any]:
    batch = {
        "nodes": torch.randn(300, 8),
        "edges": torch.randint(0, 300, (2, 1500)),
        "target": torch.randn(300, 1),
    }
    return GraphNet(n_layers=4, width=32), batch


class SeveralLosses(nn.Module):
    """An autoencoder with a classifier on its code: three losses, added by the caller."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(64, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 2 * 16)
        )
        self.decoder = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 64))
        self.classifier = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, N_CLASSES))

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, log_scale = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * log_scale.exp()
        return {
            "reconstruction": F.mse_loss(self.decoder(code), x),
            "classes": F.cross_entropy(self.classifier(code), label),
            "divergence": (mean.square() + (2 * log_scale).exp() - 2 * log_scale).mean(),
        }


def several_losses() -> tuple[nn.Module, Any]:
    return SeveralLosses(128), (torch.randn(512, 64), torch.arange(512) % N_CLASSES)


def sum_of_losses(output: Any, _batch: Any) -> torch.Tensor:
    return output["reconstruction"] + 0.5 * output["classes"] + 0.1 * output["divergence"]
