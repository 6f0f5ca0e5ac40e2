"""A model of only a head and a loss, and its step traced with rewrites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphs.costs import CostModel, Roofline
from graphs.hardware import named
from graphs.model_calls import Call, argument_order
from graphs.trace import CapturedStep, loss_index, trace_module

N_ROWS, IGNORED = 300, -100  # 4 chunks of 64 rows and one of 44
ROOFLINE = Roofline(named("cpu"))


class Head(nn.Module):
    """A head that makes logits of 3 x 100 rows, and a loss of them."""

    def __init__(self, loss: Callable[..., Any], n_classes: int = 131) -> None:
        super().__init__()
        self.head = nn.Linear(8, n_classes, bias=False)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.loss(self.head(x), y)


def batch(n_classes: int = 131) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.randint(0, n_classes, (3, 100))
    y[0, :9], y[1, 3:6] = IGNORED, 5
    return torch.randn(3, 100, 8), y


def captured(
    model: nn.Module,
    x: Any,
    y: Any,
    rewrites: tuple[str, ...],
    costs: CostModel | None = ROOFLINE,
) -> tuple[CapturedStep, Call]:
    call = Call.of((x, y), {}, order=argument_order(model.forward))
    device = torch.device("cpu")
    options: dict[str, Any] = {"device": device, "costs": costs, "gradients": "fresh"}
    return trace_module(model, call, choose=loss_index, rewrites=rewrites, **options), call


def results(model: nn.Module, run: Callable[[], Any]) -> list[torch.Tensor]:
    """Run a step: its outputs, the first of which is the loss, and all gradients."""
    model.zero_grad(set_to_none=True)
    made = run()
    made = made if isinstance(made, tuple) else (made,)
    made[0].backward()
    return [*(item.detach() for item in made), *(p.grad for p in model.parameters())]


def rows(logits: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.view(-1, logits.shape[-1]), y.view(-1)
