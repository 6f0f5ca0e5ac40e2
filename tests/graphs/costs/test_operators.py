"""FLOPs that torch's registry lacks, by hand; cost models from their descriptions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphs.costs.models import Measured, OpCall, Roofline, flops_of, from_description
from graphs.hardware import named

aten = torch.ops.aten


class Counted(TorchDispatchMode):
    """FLOPs of every operator that runs, by its name without the overload."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        self.flops[func.name().split(".")[0]] += flops_of(OpCall(func, args, kwargs or {}, value))
        return value


@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_on_the_cpu_is_not_free(bidirectional: bool) -> None:
    """4 gates from the input (16 wide) and from the hidden state (32), at 4 x 10 steps."""
    lstm = nn.LSTM(16, 32, bidirectional=bidirectional)
    x = torch.randn(10, 4, 16, requires_grad=True)
    with Counted() as counted:
        lstm(x)[0].sum().backward()
    forward = 2 * (10 * 4) * (4 * 32 * 16 + 4 * 32 * 32) * (2 if bidirectional else 1)
    assert counted.flops["aten::mkldnn_rnn_layer"] in (forward, 0)
    assert sum(counted.flops.values()) == 3 * forward  # however it is taken apart


def test_a_sum_of_products_is_not_free() -> None:
    x, y = torch.randn(3, 5, 7), torch.randn(3, 7, 9)
    with Counted() as counted:
        torch.addbmm(torch.zeros(5, 9), x, y)
    assert sum(counted.flops.values()) == 2 * 3 * 5 * 7 * 9


def test_a_bilinear_layer_is_not_free() -> None:
    layer = nn.Bilinear(6, 7, 8)
    with Counted() as counted:
        layer(torch.randn(4, 6), torch.randn(4, 7))
    assert counted.flops["aten::_trilinear"] == 3 * (4 * 6 * 7 * 8)


def test_measured_costs_are_found_again_with_what_they_fall_back_to() -> None:
    again = from_description(Measured("cpu", fallback=named("h100")).description)
    assert isinstance(again, Measured)
    assert again.description["fallback"] == "h100"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_what_was_measured_on_a_device_that_is_not_here_is_costed_by_its_roofline() -> None:
    description = {"model": "measured", "device": "cuda", "title": "NVIDIA H100 80GB HBM3"}
    again = from_description({**description, "fallback": "h100"})
    assert isinstance(again, Roofline)
    assert again.hardware is named("h100")
    generic = from_description(description)
    assert isinstance(generic, Roofline)
    assert generic.hardware is named("cpu")
