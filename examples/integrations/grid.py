"""Train with FSDP2 on top of tensor parallelism and an exported plan: four processes on the CPU.

    torchrun --nproc-per-node 4 examples/integrations/grid.py

The mesh has two rows of two tensor-parallel ranks. Tensor parallelism gives each rank a part of
every matrix; FSDP2 shards this part over the two rows. Plan the tensor-parallel module, export the
plan, then shard over the other dimension.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from checkpoint_solver import solve
from checkpoint_solver.export import to_torch_checkpoint
from checkpoint_solver.fsdp import shard

ROWS, WIDTH, N_BLOCKS, N_TENSOR = 1024, 64, 3, 2
BUDGET = "4.5MB"
"""For each rank; without a plan the step takes more."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.Sequential(nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(N_BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.blocks(x), x)


def main() -> None:
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = (n_ranks // N_TENSOR, N_TENSOR)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model = parallelize_module(Model(), mesh["tp"], styles)
    torch.manual_seed(mesh.get_local_rank("dp"))  # ranks of a row have the same batch
    batch = torch.randn(ROWS, WIDTH)

    solution = solve(model, batch, budget=BUDGET, optimizer=torch.optim.AdamW, fsdp=shape[0])
    exported = to_torch_checkpoint(model, solution)
    shard(model, solution, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
    n = exported.schedule.order
    print(f"rank {rank}: loss {loss.item():.4f}; {len(n) - len(set(n))} ops recomputed", flush=True)
    if rank == 0:
        print(exported, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
