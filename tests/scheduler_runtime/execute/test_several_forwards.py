"""Several forward passes of a planned module before one backward pass over all of their losses."""

from __future__ import annotations

import copy

import torch
from torch import nn

from scheduler_runtime import apply
from solver import solve
from tests.support.bitwise import assert_equal

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"


class Normalised(nn.Module):
    """Batch norm reads its running statistics when it runs again, and each pass changes them."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(6):
            layers += [nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_the_sum_of_several_losses_has_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = Normalised()
    batches = [torch.randn(512, 64) for _ in range(3)]
    peak_bytes = solve(model, batches[0], budget="1GB").baseline.peak_bytes
    solution = solve(model, batches[0], budget=int(0.5 * peak_bytes))
    order = solution.schedule.order
    again = {node.op for node in solution.graph.nodes if order.count(node.name) > 1}
    assert BATCH_NORM in again

    planned = apply(copy.deepcopy(model), solution)
    results = []
    for each in (model, planned):
        torch.manual_seed(1)
        torch.stack([each(x) for x in batches]).sum().backward()
        results.append([*(parameter.grad for parameter in each.parameters()), *each.buffers()])
    assert_equal(*results)
