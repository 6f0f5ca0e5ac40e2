"""Models that are not in `examples/` or a library, or only at one size there. Needs only torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

N_CLASSES = 10


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


class DenseNet(nn.Module):
    """DenseNet: every layer reads the outputs of all layers before it in its block (Huang et al.
    2017).

    stem: module that makes 2 * growth channels from the image.
    layer: (n channels, growth) -> a layer from n to growth channels.
    shrink: n channels -> the module after a block, from n to n / 2 channels.
    """

    def __init__(
        self,
        *,
        stem: nn.Module,
        layer: Callable[[int, int], nn.Module],
        shrink: Callable[[int], nn.Module],
        depths: Sequence[int],
        growth: int,
        n_classes: int,
    ) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = stem
        self.blocks = nn.ModuleList()
        self.shrink = nn.ModuleList()
        for depth in depths:
            self.blocks.append(
                nn.ModuleList(layer(width + i * growth, growth) for i in range(depth))
            )
            width += depth * growth
            self.shrink.append(shrink(width))
            width //= 2
        self.head = nn.Linear(width, n_classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for layers, shrink in zip(self.blocks, self.shrink, strict=True):
            features = [x]
            for layer in layers:
                features.append(layer(torch.cat(features, dim=1)))
            x = shrink(torch.cat(features, dim=1))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def densenet_small() -> DenseNet:
    return DenseNet(
        stem=nn.Conv2d(3, 16, 3, padding=1),
        layer=lambda n, growth: nn.Sequential(  # with dropout, without the bottleneck
            nn.BatchNorm2d(n),
            nn.ReLU(),
            nn.Conv2d(n, growth, 3, padding=1, bias=False),
            nn.Dropout(0.2),
        ),
        shrink=lambda n: nn.Sequential(nn.Conv2d(n, n // 2, 1), nn.AvgPool2d(2)),
        depths=(4, 5, 4),
        growth=8,
        n_classes=N_CLASSES,
    )


def densenet121() -> DenseNet:
    return DenseNet(
        stem=nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ),
        layer=lambda n, growth: nn.Sequential(
            nn.BatchNorm2d(n),
            nn.ReLU(),
            nn.Conv2d(n, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        ),
        shrink=lambda n: nn.Sequential(
            nn.BatchNorm2d(n), nn.ReLU(), nn.Conv2d(n, n // 2, 1, bias=False), nn.AvgPool2d(2)
        ),
        depths=(6, 12, 24, 16),
        growth=32,
        n_classes=1000,
    )


class Recurrent(nn.Module):
    """A recurrent cell in a loop over the sequence; predicts the next token at each step."""

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


class GraphNet(nn.Module):
    """A graph network (Gilmer et al. 2017): messages along edges are averaged at their targets and
    update the nodes by a GRU cell."""

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


class RMSNorm(nn.Module):
    """RMS norm written out as in transformers; nn.RMSNorm would save less for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    """Grouped-query attention, rotary positions, a gated MLP (Llama 3, Grattafiori et al. 2024)."""

    def __init__(self, width: int, mlp_width: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head = n_heads, n_kv_heads, width // n_heads
        self.attention_norm = RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, n_kv_heads * self.head, bias=False)
        self.value = nn.Linear(width, n_kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = RMSNorm(width)
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (batch, length, -1, self.head)
        q = _rotated(self.query(x).view(heads).transpose(1, 2), rotation)
        k = _rotated(self.key(x).view(heads).transpose(1, 2), rotation)
        v = self.value(x).view(heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.n_heads != self.n_kv_heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = rotation
    one, other = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-other, one), dim=-1) * sine


class Llama(nn.Module):
    def __init__(
        self,
        *,
        n_layers: int,
        width: int,
        mlp_width: int,
        n_heads: int,
        n_kv_heads: int,
        n_tokens: int,
    ) -> None:
        super().__init__()
        self.head_width = width // n_heads
        self.embedding = nn.Embedding(n_tokens, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, mlp_width, n_heads, n_kv_heads) for _ in range(n_layers)
        )
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, n_tokens, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        rotation = self._rotation(tokens.shape[1], x)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _rotation(self, length: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.arange(0, self.head_width, 2, device=x.device).float() / self.head_width
        angles = torch.arange(length, device=x.device).float()[:, None] / 500000.0**steps
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class AttentionWithDropout(nn.Module):
    """Layers of fused attention with dropout inside the kernel, which never stores a mask."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            x = x + out(y.transpose(1, 2).reshape(batch, length, width))
        return x.float().square().mean()
