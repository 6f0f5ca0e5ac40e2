"""ViT-B/16 (Dosovitskiy et al. 2020) on 64 images of 224 x 224.

solve --budget 6GB examples/vit.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class EncoderBlock(nn.Module):
    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.n_heads, width // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class ViT(nn.Module):
    def __init__(
        self,
        n_layers: int,
        width: int,
        n_heads: int,
        image_size: int,
        patch_size: int,
        n_classes: int,
        dropout: float,
    ) -> None:
        super().__init__()
        n_patches = (image_size // patch_size) ** 2
        self.patches = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, n_patches + 1, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, n_heads, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)


def get_model(
    n_layers: int = 12,
    width: int = 768,
    n_heads: int = 12,
    image_size: int = 224,
    patch_size: int = 16,
    n_classes: int = 1000,
    dropout: float = 0.1,
) -> nn.Module:
    return ViT(n_layers, width, n_heads, image_size, patch_size, n_classes, dropout)


def get_batch(
    batch_size: int = 64, image_size: int = 224, n_classes: int = 1000
) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(batch_size, 3, image_size, image_size)
    return images, torch.randint(n_classes, (batch_size,))
