"""`torch.prod`: its gradient is refused, since the formula of eager mode depends on the values."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from checkpoint_solver import fit
from graphs.model_calls import TraceError


class Products(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def planned(model: nn.Module) -> nn.Module:
    fit(model, budget="100MB", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return model


@pytest.mark.parametrize("function", [torch.prod, lambda x: x.prod(-1)], ids=["all", "dimension"])
def test_the_gradient_of_a_product_is_refused(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = planned(Products(function))
    with pytest.raises(TraceError, match=r"torch\.prod .* whether a value is zero"):
        model(torch.randn(16, 8))


@pytest.mark.parametrize("kind", ["in a submodule", "cumprod", "no gradient"])
def test_the_ways_around_it_have_the_bits_of_eager_mode(kind: str) -> None:
    torch.manual_seed(0)
    plain: nn.Module = {
        "in a submodule": nn.Sequential(nn.Linear(8, 8), Products(lambda x: x.prod(-1))),
        "cumprod": Products(lambda x: x.cumprod(-1).select(-1, -1)),
        "no gradient": Products(lambda x: x * x.detach().prod(-1, keepdim=True)),
    }[kind]
    model = planned(copy.deepcopy(plain))
    batch = torch.randn(16, 8)
    for each in (plain, model):
        each(batch).square().mean().backward()
    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, parameter.grad)
