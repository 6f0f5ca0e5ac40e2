"""Exports that keep results which eager mode makes in place, under other names than the trace's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphs.trace import trace
from scheduler_runtime.export import remove_torch_checkpoint
from scheduler_runtime.export.selective_calls import extra_bytes, may_save
from scheduler_runtime.export.stock_checkpoints import _install
from solver.module_checkpointing.region_plan import plan_regions
from solver.module_checkpointing.regions import CheckpointRegion, nodes_of
from tests.support.bitwise import assert_bitwise_identical


def drop_path(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_empty(x.shape[0], 1).bernoulli_(0.7) / 0.7


def with_a_part_written(x: torch.Tensor) -> torch.Tensor:
    written = torch.zeros_like(x)
    written[:, 1:] = x[:, 1:]
    return written * x


IN_PLACE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "bernoulli_": (drop_path, "bernoulli"),
    "bernoulli_ of strided": (lambda x: x * torch.empty_like(x.t()).bernoulli_(0.7).t(), ""),
    "normal_": (lambda x: x * x.new_empty(x.shape).normal_(), "normal_functional"),
    "random_": (lambda x: x * x.new_empty(x.shape).random_(2, 5), "mul"),
    "uniform_": (lambda x: x * x.new_empty(x.shape).uniform_(), "uniform"),
    "dropout of channels": (lambda x: F.dropout1d(x[:, :, None], 0.3)[..., 0], "div"),
    "alpha dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), "add"),
    "rrelu": (lambda x: F.rrelu(x, training=True), "pow"),
    "rrelu_": (lambda x: F.rrelu(x * 2, training=True, inplace=True), "empty_like"),
    "silu_": (lambda x: F.silu(x * 2, inplace=True) * x, "silu"),
    "pow_": (lambda x: (x * 2).abs_().pow_(3).sin(), "pow"),
    "setitem": (with_a_part_written, "mul"),
}


class _Block(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.function(self.first(x)).pow(2))


class _Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return y.square().mean()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_made_in_place_is_kept_or_recomputed_with_the_same_bits(name: str) -> None:
    function, kept = IN_PLACE[name]
    torch.manual_seed(0)
    plain = _Net(_Block(function), _Block(function))
    model, x = copy.deepcopy(plain), torch.randn(16, 8)
    graph = trace(model, (x,))
    nodes = nodes_of(graph, "0")
    whole = CheckpointRegion(nodes, modules=("0",))
    saved = may_save(graph)(CheckpointRegion(nodes, modules=("0",), saved=frozenset(nodes)))
    operators = {graph.node_by_name[node].op.split(".")[1] for node in saved}
    assert kept in operators or not kept
    for region in (whole, CheckpointRegion(nodes, modules=("0",), saved=saved)):
        plan = plan_regions(graph, [region], extra_bytes=extra_bytes(graph))
        _install(model, graph, plan)
        assert_bitwise_identical(plain, model, (x,))
        remove_torch_checkpoint(model)
