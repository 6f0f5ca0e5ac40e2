"""A U-Net (Ronneberger et al. 2015) with four levels of long skips, 8 images of 256 x 256.

    solve --budget 1GB examples/unet.py

Long skips are hard for block-level checkpointing: the first activations are read again at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class DoubleConv(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class UNet(nn.Module):
    def __init__(self, *, width: int, n_levels: int, n_classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(n_levels + 1)]
        self.down = nn.ModuleList(
            DoubleConv(n_in, n_out) for n_in, n_out in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(DoubleConv(2 * n, n) for n in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, n_classes, 1)

    def forward(self, images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        skips = []
        x = images
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return F.cross_entropy(self.head(x), masks)


def get_model(width: int = 32, n_levels: int = 4, n_classes: int = 2) -> nn.Module:
    return UNet(width=width, n_levels=n_levels, n_classes=n_classes)


def get_batch(
    batch_size: int = 8, image_size: int = 256, n_classes: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(batch_size, 3, image_size, image_size)
    return images, torch.randint(n_classes, (batch_size, image_size, image_size))
