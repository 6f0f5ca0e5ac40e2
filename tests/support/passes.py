"""Run and measure steps that call a model several times before one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from scheduler_runtime.measuring import absolute_peak_bytes, no_garbage, resident_tensors

CPU = torch.device("cpu")
Step = Callable[[nn.Module, Sequence[torch.Tensor]], None]


def blocks(*, width: int = 32, n: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(n):
        layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers)


class WithLoss(nn.Module):
    """Returns its loss, so that nothing of the step is outside of the model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def sum_of_losses(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    torch.stack([model(x) for x in batches]).sum().backward()


def trained(
    model: nn.Module, step: Step, batches: Sequence[Any], *, n_steps: int = 3
) -> tuple[list[torch.Tensor], list[int]]:
    """Train some steps with AdamW. Returns parameters, buffers and the last gradients, and the peak
    bytes of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    peaks = [step_peak_bytes(model, step, batches, optimizer) for _ in range(n_steps)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients], peaks


def step_peak_bytes(
    model: nn.Module,
    step: Step,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer | None,
    *,
    others: Sequence[nn.Module] = (),
) -> int:
    """The peak of one step, resident bytes included; it begins without gradients.

    others: further modules with parameters that the step uses.
    """
    for module in (model, *others):
        module.zero_grad()
    resident = [*resident_tensors(model, batches, () if optimizer is None else [optimizer])]
    resident += [p for module in others for p in module.parameters()]

    def run() -> None:
        step(model, batches)
        if optimizer is not None:
            optimizer.step()

    with no_garbage(CPU):
        return absolute_peak_bytes(run, CPU, resident)
