"""Export a plan as stock checkpointing and train with DDP: two processes on the CPU.

    torchrun --nproc-per-node 2 examples/integrations/export_ddp.py  # or with python

Each process plans the step for its share of the batch. Plan and export first: then DDP wraps an
ordinary module. DDP's buckets are one more copy of the gradients, which the module's plan does not
count.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `examples`, which is not installed

from checkpoint_solver import solve
from checkpoint_solver.export import to_torch_checkpoint
from examples import gpt2
from examples.integrations.two_processes import SIZES, compare, run, small_gpt2


def work(rank: int) -> None:
    model = small_gpt2()
    plain = DistributedDataParallel(copy.deepcopy(model))
    exported = to_torch_checkpoint(model, solve(model, gpt2.get_batch(**SIZES), budget="5MB"))
    if rank == 0:
        print(exported)
    compare(plain, DistributedDataParallel(model), rank)


if __name__ == "__main__":
    run(work)
