"""Plans for one of several tensor-parallel ranks, traced for the device that is here."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from graphs.trace import fake_mesh
from solver import solve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


def test_a_step_of_absent_ranks_is_traced_for_this_device(device, finding):
    with fake_mesh(2) as mesh:
        with torch.device("meta"):
            block = parallelize_module(
                Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        batch = torch.empty(8, 64, device="meta")
        found = solve(block, batch, budget="1GB", device=str(device), optimizer="AdamW")
    assert found.graph.meta.device == device.type
    assert any(node.op.startswith("_c10d_functional.") for node in found.graph.nodes)
    finding(repr(found))
