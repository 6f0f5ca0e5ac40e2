"""Export a plan as stock checkpointing and train with FSDP2 (fully_shard): two CPU processes.

    torchrun --nproc-per-node 2 examples/integrations/export_fsdp2.py  # or with python

`fsdp=2` plans for the memory of one of two ranks: its shards of parameters, gradients and optimizer
state, and the parameters that FSDP2 gathers, while they are live. Export first, then shard: FSDP2
gathers a block's parameters around its forward and again before its backward, and the recomputation
has to run inside of that.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `examples`, which is not installed

from checkpoint_solver import solve
from checkpoint_solver.export import to_torch_checkpoint
from checkpoint_solver.fsdp import shard
from examples import gpt2
from examples.integrations.two_processes import (
    N_PROCESSES,
    SIZES,
    compare,
    rank_peak_bytes,
    run,
    small_gpt2,
)

BUDGET = "4.5MB"


def work(rank: int) -> None:
    model = small_gpt2()
    batch = gpt2.get_batch(**SIZES)
    solution = solve(model, batch, budget=BUDGET, optimizer=torch.optim.AdamW, fsdp=N_PROCESSES)
    mesh = init_device_mesh("cpu", (N_PROCESSES,))
    plain = shard(copy.deepcopy(model), solution, mesh=mesh)
    exported = to_torch_checkpoint(model, solution)
    shard(model, solution, mesh=mesh)
    if rank == 0:
        print(exported)
    compare(plain, model, rank)

    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch).backward()
    optimizer.step()
    measured_bytes = rank_peak_bytes(model, optimizer, batch, predicted_bytes=exported.peak_bytes)
    print(f"rank {rank}: {exported.peak_bytes} bytes predicted, {measured_bytes} measured")


if __name__ == "__main__":
    run(work)
