"""The gradient of an output in another memory layout than the plan was traced with."""

import copy
import warnings

import pytest
import torch
from torch import nn

from checkpoint_solver import fit

WEIGHTS = torch.randn(16, 8, 64, generator=torch.Generator().manual_seed(1))


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    return plain, copy.deepcopy(plain)


def test_another_layout_is_told_and_the_remedy_gives_the_same_bits() -> None:
    plain, planned = models()
    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters(), lr=0.1))
    batch = torch.randn(8, 64, 32)
    with pytest.warns(UserWarning, match="arrives with strides"):
        (planned(batch).permute(2, 0, 1) * WEIGHTS).sum().backward()
    planned.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (plain, planned):
            output = model(batch)
            output.register_hook(torch.Tensor.contiguous)
            (output.permute(2, 0, 1) * WEIGHTS).sum().backward()
    for expected, parameter in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(expected.grad, parameter.grad)


def test_an_expanded_gradient_has_the_same_bits_and_is_not_told() -> None:
    plain, planned = models()
    fit(planned, budget="100MB", optimizer=torch.optim.SGD(planned.parameters(), lr=0.1))
    batch = torch.randn(7, 51, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (plain, planned):
            (model(batch).mean() * 0.3).backward()
    for expected, parameter in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(expected.grad, parameter.grad)
