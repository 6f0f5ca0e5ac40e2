"""Train two ranks with plans under DeepSpeed's engine. Each rank prints predicted and measured
bytes for each case, in JSON.

    DS_ACCELERATOR=cpu python -m tests.support.zero_ranks         # all cases
    DS_ACCELERATOR=cpu python -m tests.support.zero_ranks '3, '   # cases that begin with "3, "
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import warnings
from itertools import compress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from checkpoint_solver import Zero, apply, solve
from checkpoint_solver.costs import cpu_peak_bytes
from checkpoint_solver.export import to_torch_checkpoint
from examples import gpt2
from examples.integrations.two_processes import N_PROCESSES, SIZES, run, small_gpt2

N_MEASURED = 5
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    f"{stage}, {'bf16' if in_bf16 else 'fp32'}, {words}": (
        {"stage": stage, "reduce_bucket_size": n_elements, **options},
        in_bf16,
    )
    for stage in (1, 2)
    for in_bf16 in (False, True)
    for words, n_elements, options in (
        ("several buckets", 60_000, {}),
        ("one bucket", 400_000, {}),
        ("overlap", 60_000, {"overlap_comm": True}),
        ("parameters above the bucket", 20_000, {}),
    )
}
CASES |= {
    f"3, {'bf16' if in_bf16 else 'fp32'}, {words}": (
        {"stage": 3, "reduce_bucket_size": 60_000, **options},
        in_bf16,
    )
    for in_bf16 in (False, True)
    for words, options in (
        ("all may be whole", {}),
        (
            "few may be whole",
            {
                "stage3_max_live_parameters": 20_000,
                "stage3_max_reuse_distance": 20_000,
                "stage3_prefetch_bucket_size": 10_000,
                "stage3_param_persistence_threshold": 100,
            },
        ),
    )
}
"""Name -> configuration of "zero_optimization", and whether the model is in bf16. The model is
`small_gpt2`, with 236,928 parameters, of which the largest tensor has 32,768."""


def tensors_bytes() -> int:
    """Bytes of all CPU storages that Python's tensors refer to, without fake tensors."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    is_real = [t.device.type == "cpu" and not isinstance(t, FakeTensor) for t in found]
    held = {t.untyped_storage().data_ptr(): t for t in compress(found, is_real)}
    return sum(each.untyped_storage().nbytes() for each in held.values())


def measured(options: dict[str, Any], *, in_bf16: bool, rank: int) -> dict[str, Any]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": SIZES["batch_size"],
        "zero_optimization": options,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": in_bf16},
    }
    before_bytes = tensors_bytes()
    model = small_gpt2().to(torch.bfloat16 if in_bf16 else torch.float32)
    torch.manual_seed(rank)
    batch = gpt2.get_batch(**SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero = Zero(n_ranks=N_PROCESSES, config=config)
    asked: dict[str, Any] = {"optimizer": optimizer, "zero": zero, "rewrites": "none"}
    plain = solve(model, batch, budget="1GB", **asked)
    baseline_bytes = plain.baseline.peak_bytes
    activations_bytes = baseline_bytes - plain.graph.resident_bytes
    budget_bytes = baseline_bytes - activations_bytes * 11 // 20
    solution = solve(model, batch, budget=budget_bytes, **asked)
    assert solution.simulation is not None, solution
    found = {
        "baseline_bytes": baseline_bytes,
        "predicted_bytes": solution.simulation.peak_bytes,
        "n_recomputed": solution.simulation.n_recomputed,
        "of_engine": solution.graph.meta.environment["zero"],
    }
    if zero.stage == 3:
        found["predicted_bytes"] = to_torch_checkpoint(model, solution).peak_bytes
    else:
        apply(model, solution)
    del solution, plain, asked
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()

    step()
    step()
    taken = [cpu_peak_bytes(step).peak_bytes for _ in range(N_MEASURED)]
    held_bytes = tensors_bytes() - before_bytes
    engine.destroy()
    return found | {"measured_bytes": min(taken) + held_bytes}


def work(rank: int, *, begins: str = "") -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(N_PROCESSES))
    output, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed prints to stdout
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for name, (options, in_bf16) in CASES.items():
        if not name.startswith(begins):
            continue
        found = measured(options, in_bf16=in_bf16, rank=rank)
        print(json.dumps([name, rank, found]), file=output, flush=True)


if __name__ == "__main__":
    run(functools.partial(work, begins="".join(sys.argv[1:2])))
