"""A plan exported as stock checkpointing, under FSDP2 (fully_shard): two processes on the CPU.

    python -m examples.integrations.export_fsdp2

Export first, shard after: FSDP2 gathers a block's parameters around its forward and again before
its backward, and what runs again runs in between. The plan counts whole parameters, gradients and
optimizer state; each process then holds its share of them, so its peak is below the plan's.
"""

from __future__ import annotations

import copy

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples import gpt2
from examples.integrations.two_processes import N_PROCESSES, SIZES, compare, run, small_gpt2
from scheduler_runtime.export import to_torch_checkpoint
from solver import solve


def sharded(model: nn.Module) -> nn.Module:
    """Each block by itself, then the rest."""
    mesh = init_device_mesh("cpu", (N_PROCESSES,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def work(rank: int) -> None:
    model = small_gpt2()
    plain = sharded(copy.deepcopy(model))
    exported = to_torch_checkpoint(model, solve(model, gpt2.get_batch(**SIZES), budget="5MB"))
    if rank == 0:
        print(exported)
    compare(plain, sharded(model), rank)


if __name__ == "__main__":
    run(work)
