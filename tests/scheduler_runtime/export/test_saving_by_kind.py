"""Selective checkpointing whose policy names kinds of operators, as in torchtitan and axolotl."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphs.trace import trace
from scheduler_runtime import measure
from solver.module_checkpointing import CheckpointRegion, plan_regions
from solver.module_checkpointing.regions import nodes_of

N_ROWS, WIDTH, DEPTH = 512, 64, 4
PRODUCT = torch.ops.aten.mm.default


class Block(nn.Module):
    """Three products; the backward pass reads the results of all but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.gate(x)) * self.up(x))


class Blocks(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 32 * WIDTH, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False, context_fn=_contexts)
            else:
                x = block(x)
        return torch.tanh(self.head(x)).square().mean()


def _contexts() -> Any:
    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        saved = operator is PRODUCT
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.fixture(name="batch")
def _batch() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(N_ROWS, WIDTH)


def test_the_peak_counts_results_that_are_kept_and_not_read(batch: torch.Tensor) -> None:
    """PyTorch keeps them until the block's backward is over."""
    graph = trace(Blocks(checkpointed=False), batch)
    regions = []
    for index in range(DEPTH):
        nodes = nodes_of(graph, f"blocks.{index}")
        products = frozenset(name for name in nodes if graph.node_by_name[name].op == str(PRODUCT))
        assert len(products) == 3
        regions.append(CheckpointRegion(nodes, (f"blocks.{index}",), products, keeps_unread=True))
    predicted = plan_regions(graph, regions).simulation.peak_bytes
    measured = measure(Blocks(checkpointed=True), batch, n_steps=1).peak_bytes
    assert predicted == pytest.approx(measured, rel=0.005)
    without = [dataclasses.replace(region, keeps_unread=False) for region in regions]
    unread_bytes = DEPTH * batch.nbytes
    assert plan_regions(graph, without).simulation.peak_bytes == predicted - unread_bytes
