"""A planned pipeline under torch.distributed.pipelining: two stages on the CPU.

    torchrun --nproc-per-node 2 examples/integrations/pipeline.py

Each process plans its own stage from tensors without memory, within the same budget. The first
stage has two micro-batches in flight, the last one has one, so their plans differ.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from checkpoint_solver import Pipeline, apply, solve

N_STAGES, N_MICROBATCHES, ROWS, WIDTH = 2, 4, 256, 64
BUDGET = "3.5MB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def main(rank: int) -> None:
    pipeline = Pipeline(stage=rank, n_stages=N_STAGES, n_microbatches=N_MICROBATCHES)
    stage = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=not pipeline.is_first)
    if pipeline.is_last:
        solution = solve(
            stage,
            (x, torch.empty(ROWS, WIDTH, device="meta")),
            inputs=lambda batch: batch[0],
            loss=lambda output, batch: F.mse_loss(output, batch[1]),
            budget=BUDGET,
            optimizer=optimizer,
            pipeline=pipeline,
        )
    else:  # the gradients of its outputs come from the next stage
        solution = solve(stage, x, budget=BUDGET, optimizer=optimizer, pipeline=pipeline)
    print(solution, flush=True)
    apply(stage, solution)

    example = torch.empty(ROWS, WIDTH, requires_grad=True)
    runner = PipelineStage(
        stage, rank, N_STAGES, torch.device("cpu"), input_args=example, output_args=example
    )
    schedule = Schedule1F1B(runner, n_microbatches=N_MICROBATCHES, loss_fn=F.mse_loss)
    torch.manual_seed(0)
    batch, target = torch.randn(2, N_MICROBATCHES * ROWS, WIDTH)
    for _ in range(3):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if pipeline.is_first:
            schedule.step(batch)
        else:
            schedule.step(target=target, losses=losses, return_outputs=False)
        optimizer.step()
        if losses:
            print(f"loss {torch.stack(losses).mean().item():.4f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    try:
        main(dist.get_rank())
    finally:
        dist.destroy_process_group()
