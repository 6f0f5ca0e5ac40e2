"""A product with a frozen weight: eager mode runs one product or a batch of them, by the strides,
and their bits differ for some sizes.
"""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint_solver import apply, solve
from tests.support.bitwise import assert_same_gradients

PARTS = {
    "rows": lambda x: x[..., :7].split(3, dim=1),
    "columns": lambda x: x.split(7, dim=-1),
    "one row": lambda x: x[:, :1].split(7, dim=-1),
    "transposed": lambda x: [x[:, :14, :7].transpose(0, 1), x[:, :7].mT[:, :7]],
}


class Products(TorchDispatchMode):
    """Notes the products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class FrozenHead(nn.Module):
    def __init__(self, parts: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(7, 14), parts
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts(self.first(x))
        return torch.stack([self.head(each).square().mean() for each in parts]).sum()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_products_are_those_of_eager_mode(part: str, batch_size: int) -> None:
    torch.manual_seed(0)
    plain = FrozenHead(PARTS[part])
    batch = torch.randn(batch_size, 14, 7)
    solution = solve(plain, (batch,), budget="1MB", rewrites="none")
    model = copy.deepcopy(plain)
    apply(model, solution)
    with Products() as products:
        expected = plain(batch)
    got = model(batch)
    forward = [node.op for node in solution.graph.forward_nodes if "mm" in node.op]
    assert forward == products.names
    expected.backward()
    got.backward()
    assert torch.equal(got, expected)
    assert_same_gradients(plain.first, model.first)
