"""A critic with a gradient penalty (WGAN-GP, Gulrajani et al. 2017), 32 images of 64 x 64.

    solve --budget 200MB examples/gradient_penalty.py

The penalty differentiates the critic with `create_graph=True`. Outside of a planned module that is
an error. So the planned module is one around the critic, whose `forward` computes the penalty; the
critic keeps its own `forward` for other uses.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self, *, width: int, n_stages: int) -> None:
        super().__init__()
        widths = [3, *(width * 2**stage for stage in range(n_stages))]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(n_in, n_out, 3, padding=1),
                    nn.LeakyReLU(0.2),
                    nn.Conv2d(n_out, n_out, 4, stride=2, padding=1),
                    nn.LeakyReLU(0.2),
                )
                for n_in, n_out in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(images).mean((2, 3)))


class CriticLoss(nn.Module):
    def __init__(self, critic: nn.Module, *, weight: float) -> None:
        super().__init__()
        self.critic, self.weight = critic, weight

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        share = torch.rand(len(real), 1, 1, 1, device=real.device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + self.weight * penalty


def get_model(width: int = 32, n_stages: int = 4, weight: float = 10.0) -> nn.Module:
    return CriticLoss(Critic(width=width, n_stages=n_stages), weight=weight)


def get_batch(batch_size: int = 32, image_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    real, fake = torch.randn(2, batch_size, 3, image_size, image_size)
    return real, fake
