"""Train with a plan under DeepSpeed's ZeRO, bitwise as without one: two processes on the CPU.

    torchrun --nproc-per-node 2 examples/integrations/zero.py 1    # the stage: 1, 2 or 3

Needs `pip install deepspeed`; set DS_ACCELERATOR=cpu if there is no GPU. Under ZeRO-3, DeepSpeed's
engine gathers parameters in module hooks, so the plan is exported as stock checkpointing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `examples`, which is not installed

from checkpoint_solver import Zero, apply, solve
from checkpoint_solver.costs import cpu_peak_bytes
from checkpoint_solver.export import to_torch_checkpoint
from examples import gpt2
from examples.integrations.two_processes import N_STEPS, SIZES, small_gpt2

BUDGET = "7MB"
"""For a rank, with the engine's own memory. Without a plan the step takes more."""
BUCKET = 60_000
"""Elements of a bucket; the engine allocates buckets of this size for any model."""
FEW = 20_000
"""How many elements ZeRO-3 may prefetch or keep gathered. The defaults exceed this small model."""


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SIZES["batch_size"],
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "stage3_max_live_parameters": FEW,
            "stage3_max_reuse_distance": FEW,
            "stage3_prefetch_bucket_size": FEW,
            "stage3_param_persistence_threshold": 100,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def planned(model: nn.Module, batch: Any, stage: int, optimizer: torch.optim.Optimizer) -> int:
    """Put a plan for one rank into the model; returns how many operators it recomputes."""
    zero = Zero(n_ranks=dist.get_world_size(), config=config_of(stage))
    solution = solve(model, batch, budget=BUDGET, optimizer=optimizer, zero=zero, rewrites="none")
    assert solution.simulation is not None, solution
    if stage == 3:
        to_torch_checkpoint(model, solution)
    else:
        apply(model, solution)
    return solution.simulation.n_recomputed


def trained(stage: int, rank: int, *, with_plan: bool) -> tuple[list[torch.Tensor], int, int]:
    """Train; returns the losses and parameters, the peak of a later step (bytes above what was live
    before it), and the number of recomputed operators."""
    model = small_gpt2()
    torch.manual_seed(rank)
    batch = gpt2.get_batch(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n_recomputed = planned(model, batch, stage, optimizer) if with_plan else 0
    config = config_of(stage)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(7 + rank)
    losses = []

    def step() -> None:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())

    for _ in range(N_STEPS):
        step()
    parameters = [safe_get_full_fp32_param(p).clone() for p in model.parameters()]
    results = [*losses, *parameters]
    return results, cpu_peak_bytes(step).peak_bytes, n_recomputed


def main() -> None:
    stage = int(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    expected, plain_bytes, _ = trained(stage, rank, with_plan=False)
    got, planned_bytes, n_recomputed = trained(stage, rank, with_plan=True)
    same = all(map(torch.equal, expected, got))
    print(
        f"rank {rank}, ZeRO-{stage}: {n_recomputed} ops recomputed; losses and parameters "
        f"{'are the same bits' if same else 'DIFFER'}; the step took {plain_bytes} bytes without "
        f"and {planned_bytes} with the plan",
        flush=True,
    )
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
