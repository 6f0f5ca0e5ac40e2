"""Tensor-parallel training with a plan: two processes on the CPU.

    torchrun --nproc-per-node 2 examples/integrations/tensor_parallel.py

Each block's matrices are split over the ranks; between blocks, each rank has half of the sequence.
`fit` plans at the first step; all ranks run the plan of the first rank.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from checkpoint_solver import fit, plans_of

ROWS, LENGTH, WIDTH, N_BLOCKS = 4, 256, 64, 3
BUDGET = "4MB"
"""For each rank; without a plan the step takes more."""


class FeedForward(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.feed_forward(self.norm(x))


def parallel_styles() -> dict[str, object]:
    """The plan for `parallelize_module`: path of a submodule -> its parallel style."""
    styles: dict[str, object] = {}
    for index in range(N_BLOCKS):
        styles |= {
            f"{index}.norm": SequenceParallel(),
            f"{index}.feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            f"{index}.feed_forward.up": ColwiseParallel(),
            f"{index}.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return styles


def main() -> None:
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(N_BLOCKS)))
    parallelize_module(model, init_device_mesh("cpu", (n_ranks,)), parallel_styles())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit(model, budget=BUDGET, optimizer=optimizer)

    batch = torch.randn(ROWS, LENGTH, WIDTH).chunk(n_ranks, dim=1)[rank].contiguous()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: loss of its part {loss.item():.4f}", flush=True)
    for plan in plans_of(model):
        print(f"rank {rank}: {plan.solution}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
