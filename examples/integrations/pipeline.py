"""Plan a pipeline and run it with torch.distributed.pipelining: two stages on the CPU.

    torchrun --nproc-per-node 2 examples/integrations/pipeline.py

The first process divides the layers and plans both stages for the same budget, on the meta device,
and sends the result to the other process, so that both have the same plans. The first stage has two
micro-batches in flight, the last stage has one, and the head; so the stages' plans differ.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from checkpoint_solver import PipelineSplit, apply, split_pipeline, steps_together

N_STAGES, N_MICROBATCHES, ROWS, WIDTH, N_CLASSES = 2, 4, 256, 64, 512
BUDGET = "4.6MB"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def layers() -> list[nn.Module]:
    return [*(Block() for _ in range(5)), nn.Linear(WIDTH, N_CLASSES)]


def planned() -> PipelineSplit:
    with torch.device("meta"):
        x, target = torch.empty(ROWS, WIDTH), torch.empty(ROWS, dtype=torch.long)
        return split_pipeline(
            layers(),
            x,
            target=target,
            loss=F.cross_entropy,
            n_stages=N_STAGES,
            n_microbatches=N_MICROBATCHES,
            budget=BUDGET,
            optimizer=torch.optim.AdamW,
        )


def main(rank: int) -> None:
    shared = [planned() if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    split = shared[0]
    assert split is not None
    if rank == 0:
        print(split, flush=True)
    print(split.solutions[rank], flush=True)

    stage = nn.Sequential(*layers()[split.slices[rank]])
    apply(stage, split.solutions[rank])
    is_last = rank == N_STAGES - 1
    example = torch.empty(ROWS, WIDTH, requires_grad=True)
    output = torch.empty(ROWS, N_CLASSES if is_last else WIDTH, requires_grad=True)
    runner = PipelineStage(
        stage, rank, N_STAGES, torch.device("cpu"), input_args=example, output_args=output
    )
    schedule = steps_together(
        Schedule1F1B(runner, n_microbatches=N_MICROBATCHES, loss_fn=F.cross_entropy)
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    torch.manual_seed(0)
    batch = torch.randn(N_MICROBATCHES * ROWS, WIDTH)
    target = torch.randint(N_CLASSES, (N_MICROBATCHES * ROWS,))
    for _ in range(3):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
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
