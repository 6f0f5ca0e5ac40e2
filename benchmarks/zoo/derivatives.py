"""Models whose `forward` takes derivatives, so that a training step differentiates a gradient."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from examples import force_field, gradient_penalty


class Burgers(nn.Module):
    """A physics-informed network for Burgers' equation (Raissi et al. 2019)."""

    def __init__(self, *, width: int, n_layers: int) -> None:
        super().__init__()
        widths = [2, *[width] * n_layers]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(n_in, n_out), nn.Tanh())
                for n_in, n_out in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        u = self.head(self.layers(torch.stack([x, t], dim=-1))).squeeze(-1)
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        at_start = torch.where(t == 0, u + torch.sin(torch.pi * x), 0)
        return (u_t + u * u_x - 0.01 / torch.pi * u_xx).square().mean() + at_start.square().mean()


class Adapted(nn.Module):
    """Meta-learning (MAML, Finn et al. 2017): inner steps of gradient descent, then the loss."""

    def __init__(self, *, width: int, n_layers: int, n_steps: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(n_layers))
        )
        self.n_steps = n_steps

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, new_x: torch.Tensor, new_y: torch.Tensor
    ) -> torch.Tensor:
        weights = dict(self.layers.named_parameters())
        for _ in range(self.n_steps):
            loss = F.mse_loss(torch.func.functional_call(self.layers, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            weights = {
                name: weight - 0.1 * gradient
                for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
            }
        return F.mse_loss(torch.func.functional_call(self.layers, weights, (new_x,)), new_y)


def _force_field() -> tuple[nn.Module, Any]:
    model = force_field.get_model(width=64, n_distances=32)
    return model, force_field.get_batch(batch_size=4)


def _gradient_penalty() -> tuple[nn.Module, Any]:
    return gradient_penalty.get_model(width=16), gradient_penalty.get_batch(batch_size=8)


def _burgers() -> tuple[nn.Module, Any]:
    x, t = 2 * torch.rand(4096) - 1, torch.rand(4096).clamp_min(0.1) - 0.1
    return Burgers(width=64, n_layers=8), (x, t)


def _adapted() -> tuple[nn.Module, Any]:
    return Adapted(width=64, n_layers=6, n_steps=3), tuple(torch.randn(4, 1024, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "force field": _force_field,
    "gradient penalty": _gradient_penalty,
    "Burgers' equation": _burgers,
    "meta-learning": _adapted,
}
"""Name -> makes the model, whose forward returns the loss, and its batch."""

_LAYERS = {"force field": "layers", "gradient penalty": "critic.stages"}


def with_checkpoints(name: str, model: nn.Module) -> nn.Module:
    """A copy with a checkpoint of PyTorch around each layer."""
    model = copy.deepcopy(model)
    for layer in model.get_submodule(_LAYERS.get(name, "layers")).children():
        layer.forward = _Checkpointed(layer.forward)
    return model


class _Checkpointed:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any) -> Any:
        return checkpoint(self._forward, *args, use_reentrant=False)
