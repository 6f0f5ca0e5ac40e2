"""Plan the stages of a pipeline whose parameters FSDP2 shards: four processes on the CPU.

    torchrun --nproc-per-node 4 examples/integrations/sharded_pipeline.py

There are two stages of two ranks each. The first process divides the layers and plans both stages,
on the meta device, for a rank with its shard of the optimizer state. Each rank exports the plan of
its stage as stock checkpointing, shards the stage, and trains.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `examples`, which is not installed

from checkpoint_solver import PipelineSplit, split_pipeline
from checkpoint_solver.export import to_torch_checkpoint
from checkpoint_solver.fsdp import shard
from examples.integrations.pipeline import N_CLASSES, N_MICROBATCHES, ROWS, WIDTH, layers

N_STAGES, N_SHARDS = 2, 2
BUDGET = "4.4MB"


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
            fsdp=N_SHARDS,
        )


def main() -> None:
    mesh = init_device_mesh("cpu", (N_STAGES, N_SHARDS), mesh_dim_names=("pp", "dp"))
    shared = [planned() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    split, index = shared[0], mesh.get_local_rank("pp")
    assert split is not None
    solution = split.solutions[index]

    torch.manual_seed(index)  # ranks of a stage start with the same parameters
    stage = nn.Sequential(*layers()[split.slices[index]])
    exported = to_torch_checkpoint(stage, solution)
    shard(stage, solution, mesh=mesh["dp"])
    is_last = index == N_STAGES - 1
    example = torch.empty(ROWS, WIDTH, requires_grad=True)
    output = torch.empty(ROWS, N_CLASSES if is_last else WIDTH, requires_grad=True)
    runner = PipelineStage(
        stage,
        index,
        N_STAGES,
        torch.device("cpu"),
        input_args=example,
        output_args=output,
        group=mesh.get_group("pp"),
    )
    schedule = Schedule1F1B(runner, n_microbatches=N_MICROBATCHES, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    torch.manual_seed(mesh.get_local_rank("dp"))  # each pipeline has its own batch
    batch = torch.randn(N_MICROBATCHES * ROWS, WIDTH)
    target = torch.randint(N_CLASSES, (N_MICROBATCHES * ROWS,))
    losses: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        if is_last:
            losses.clear()
            schedule.step(target=target, losses=losses, return_outputs=False)
        else:
            schedule.step(batch)
        optimizer.step()
    order = exported.schedule.order
    loss = f", loss {torch.stack(losses).mean().item():.4f}" if losses else ""
    print(
        f"rank {dist.get_rank()}, stage {index} of {'+'.join(map(str, split.sizes))} layers: "
        f"{len(order) - len(set(order))} ops recomputed, {exported.peak_bytes} bytes{loss}",
        flush=True,
    )


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
