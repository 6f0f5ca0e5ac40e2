"""Non-contiguous outputs, and gradients with other strides than theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphs.trace import trace
from scheduler_runtime import apply
from solver.schedule.recompute import keep
from tests.support.bitwise import assert_same_gradients, solution_of

OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "image of rows": lambda h: h.view(2, 4, 4, 6).permute(0, 3, 1, 2),
    "transposed": lambda h: h.transpose(0, 1),
    "every other": lambda h: h[:, ::2, 1:],
    "expanded": lambda h: h.sum(1, keepdim=True).expand(2, 4, 6),
}
LOSSES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "in rows": lambda o, _: (o * torch.linspace(-1.0, 1.0, o.numel()).view(o.shape)).sum(),
    "expanded": lambda o, _: o.sum(),
    "as the output": lambda o, _: o.cos().sum(),
}


class Returning(nn.Module):
    def __init__(self, output: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)
        self.output = output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.linear(x).tanh())


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_the_gradients_are_those_of_the_plain_model(
    output: Callable[[torch.Tensor], torch.Tensor],
    loss: Callable[[torch.Tensor, Any], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    plain, x = Returning(output), torch.randn(2, 16, 3)
    planned = copy.deepcopy(plain)
    graph = trace(planned, x, loss=loss)
    apply(planned, solution_of(graph, keep(graph, set())))
    for model in (plain, planned):
        loss(model(x), None).backward()
    assert_same_gradients(plain, planned)


@pytest.mark.slow
def test_an_expanded_gradient_is_copied_and_the_copy_is_counted() -> None:
    """One in rows is planned for as it arrives."""
    copied = {
        name: any("contiguous" in node.name for node in graph.nodes if node.phase == "outside")
        for name, loss in LOSSES.items()
        if (graph := trace(Returning(OUTPUTS["image of rows"]), torch.randn(2, 16, 3), loss=loss))
    }
    assert copied == {"in rows": False, "expanded": True, "as the output": False}
