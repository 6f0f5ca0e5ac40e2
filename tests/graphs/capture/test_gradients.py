"""Gradients whose formula depends on values, or on whether PyTorch traces: those of eager mode."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.same_bits import keeping_nothing
from checkpoint_solver import apply
from graphs.model_calls import TraceError
from graphs.trace import trace
from tests.support.bitwise import assert_equal

MASK = torch.rand(40, 8, generator=torch.Generator().manual_seed(1)) < 0.5


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function
        self.number = nn.Parameter(torch.tensor(0.3))
        self.table = nn.Parameter(torch.randn(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x) + self.table, self.number).square().mean()


NOT_ZERO = torch.rand(13, 11, generator=torch.Generator().manual_seed(0)) > 0.1


def complex_with_zeros(x: torch.Tensor) -> torch.Tensor:
    """An odd number of them: the kernels' vectors begin elsewhere in a selection."""
    return torch.view_as_complex(x.reshape(-1, 2))[:143].view(13, 11) * NOT_ZERO


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "prod": lambda x, _: x[:2].prod(),
    "prod with a zero": lambda x, n: (x.relu()[:2] * n).prod(),
    "prod of a dimension": lambda x, n: x.prod(-1) * n,
    "prod, dimension kept": lambda x, _: x.prod(1, keepdim=True),
    "prod of a dimension with zeros": lambda x, _: x.relu().prod(0),
    "prod in float64": lambda x, _: x.prod(-1, dtype=torch.float64).float(),
    "masked_fill": lambda x, n: x.masked_fill(MASK, n),
    "masked_fill, wider mask": lambda x, n: x[:1].masked_fill(MASK, n),
    "masked_fill_": lambda x, n: (x * 1).masked_fill_(MASK, n),
    "masked_fill by a number": lambda x, _: x.masked_fill(MASK, 0.5),
    "max": lambda x, _: x.max() - 9,
    "min": lambda x, _: x.mT.min() - 9,
    "median": lambda x, _: x.median() - 9,
    "nanmedian": lambda x, _: x.nanmedian() - 9,
    "complex cumprod with zeros": lambda x, _: torch.view_as_real(complex_with_zeros(x).cumprod(1)),
}


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_have_the_bits_of_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    plain = Function(FUNCTIONS[name])
    batch = torch.randn(40, 8).requires_grad_()
    planned = apply(copy.deepcopy(plain), keeping_nothing(trace(plain, batch)))
    found = []
    for model in (plain, planned):
        batch.grad = None
        model(batch).backward()
        grads = (batch.grad, *(p.grad for p in model.parameters()))
        # byte by byte: -0 is not 0
        found.append([None if g is None else g.view(torch.int32).clone() for g in grads])
    assert_equal(*found)


def test_the_workspace_of_such_a_function_is_counted() -> None:
    graph = trace(Function(lambda x, n: x.masked_fill(MASK, n)), torch.randn(40, 8))
    (node,) = [node for node in graph.nodes if node.op.startswith("checkpoint_solver")]
    assert node.workspace_bytes >= 40 * 8 * 4


def test_a_product_whose_gradient_has_no_one_layout_is_refused() -> None:
    with pytest.raises(TraceError, match=r"torch\.prod .* memory layout .* \.contiguous\(\)"):
        trace(Function(lambda x, _: x.mT.prod(-1)), torch.randn(40, 8))
