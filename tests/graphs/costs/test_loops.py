"""Operators that loop over chunks of rows: F.linear_cross_entropy with chunks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.costs import Measured, OpCall, Roofline, cpu_peak_bytes
from graphs.costs.models import DISPATCH_S
from graphs.hardware import named
from graphs.trace import trace

if not hasattr(nn, "LinearCrossEntropyOptions"):
    pytest.skip(
        f"torch {torch.__version__} has no F.linear_cross_entropy; 2.13 has",
        allow_module_level=True,
    )

import torch.nn.modules.linear_cross_entropy  # registers its operators

OPS = torch.ops.torch_nn


def scalar_call(
    n_rows: int, chunk_rows: int, *, policy: str = "compact", bias: bool = False
) -> OpCall:
    """Mean loss of rows of 64 features over 1000 classes, and gradients."""
    x, weight, target = torch.randn(n_rows, 64), torch.randn(1000, 64), torch.arange(n_rows) % 1000
    of_bias = torch.randn(1000) if bias else None
    options = (None, "mean", -100, 0.0, chunk_rows, policy, torch.float32, True)
    args: tuple[Any, ...] = (x, weight, target, of_bias, *options, True, True, bias)
    op = OPS._linear_cross_entropy_batch_chunked.default
    return OpCall(op, args, {}, op(*args))


def row_call(n_rows: int, chunk_rows: int) -> OpCall:
    """The loss of each row; gradients are made in the backward pass."""
    x, weight, target = torch.randn(n_rows, 64), torch.randn(1000, 64), torch.arange(n_rows) % 1000
    args = (x, weight, target, None, None, -100, chunk_rows, "compact", torch.float32)
    op = OPS._linear_cross_entropy_batch_chunked_no_reduction.default
    return OpCall(op, args, {}, op(*args))


@pytest.mark.parametrize(("call", "n_products"), [(scalar_call, 3), (row_call, 1)])
def test_the_time_is_that_of_the_products_on_a_device_without_other_limits(
    call, n_products
) -> None:
    slow = dataclasses.replace(named("cpu"), flops_per_s={"float32": 1e9}, bytes_per_s=1e18)
    fast = dataclasses.replace(slow, flops_per_s={"float32": 1e18})
    loop = call(1024, 256)
    of_products_s = Roofline(slow).cost(loop).time_s - Roofline(fast).cost(loop).time_s
    n_calls = 4 * n_products
    assert of_products_s == pytest.approx(
        n_products * 2 * 1024 * 64 * 1000 / 1e9 - n_calls * DISPATCH_S
    )


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    "loop",
    [
        scalar_call(512, 128),
        scalar_call(512, 128, bias=True),
        scalar_call(600, 128),
        scalar_call(100, 100),
        scalar_call(512, 128, policy="accurate"),
        row_call(600, 128),
    ],
    ids=["compact", "bias", "remainder", "one chunk", "accurate", "rows"],
)
def test_the_workspace_is_what_a_run_allocates(loop) -> None:
    with torch.no_grad():
        peak_bytes = cpu_peak_bytes(lambda: loop.target(*loop.args)).peak_bytes
    predicted = Roofline(named("cpu")).cost(loop).workspace_bytes
    assert predicted == pytest.approx(peak_bytes - loop.made_bytes(), abs=1024)
    assert predicted >= 4 * 1000 * min(loop.args[0].shape[0], 128)  # the logits of one chunk


def test_a_few_chunks_tell_the_cost_of_many() -> None:
    """Those of one more chunk, and a few bytes per row."""
    costs = [Roofline(named("cpu")).cost(scalar_call(n, 64)) for n in (256, 320, 384)]
    more = [
        (b.time_s - a.time_s, b.workspace_bytes - a.workspace_bytes)
        for a, b in itertools.pairwise(costs)
    ]
    assert more[0] == pytest.approx(more[1])
    assert more[0][0] > 64 * 6 * 64 * 1000 / named("cpu").rate("float32")
    assert more[0][1] < 64 * 64


def test_measured_costs_run_it() -> None:
    costs = Measured("cpu", n_runs=1)
    loop = scalar_call(256, 64)
    assert costs.cost(loop).workspace_bytes == Roofline(named("cpu")).cost(loop).workspace_bytes
    assert costs.n_fallbacks == 0


class Head(nn.Module):
    def __init__(self, *, share: float) -> None:
        super().__init__()
        self.body, self.head, self.share = nn.Linear(64, 64), nn.Linear(64, 1000, bias=False), share

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=128)
        loss = F.linear_cross_entropy(self.body(x), self.head.weight, y, options=options)
        return loss if self.share == 1 else self.share * loss


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("share", [1, 0.5])
def test_in_a_step_it_has_its_cost_and_may_run_again_unless_it_makes_what_is_returned(
    share,
) -> None:
    graph = trace(Head(share=share), (torch.randn(512, 64), torch.arange(512)))
    (node,) = (node for node in graph.nodes if "linear_cross_entropy" in node.op)
    assert node.recomputable == (share != 1)
    assert node.workspace_bytes >= 4 * 128 * 1000
    assert node.time_s > 6 * 512 * 64 * 1000 / named("cpu").rate("float32")
