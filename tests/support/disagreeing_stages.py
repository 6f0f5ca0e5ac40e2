"""2 x 2 gloo ranks of sharded stages that do not agree. Each prints the outcome of each case.

python -m tests.support.disagreeing_stages
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from examples.integrations.two_processes import run
from graphs import Pipeline
from scheduler_runtime import on_all_ranks
from solver import Solution, solve

WIDTH, ROWS = 8, 16


def planned(index: int, *, rows: int = ROWS, n_microbatches: int = 4) -> Solution:
    place = Pipeline(index, 2, n_microbatches)
    x = torch.empty(rows, WIDTH, device="meta", requires_grad=not place.is_first)
    loss = {"loss": lambda y, _: y.sum()} if place.is_last else {}
    return solve(layers(), x, budget="1MB", pipeline=place, fsdp=2, **loss)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def fails(rank: int, index: int) -> Solution:
    if rank == 3:
        raise ValueError("no model here")
    return planned(index)


CASES: dict[str, Callable[[int, int], Solution]] = {
    "agree": lambda _rank, index: planned(index),
    "one fails": fails,
    "micro-batches": lambda rank, index: planned(index, n_microbatches=4 + (rank == 3)),
    "shapes": lambda rank, index: planned(index, rows=ROWS + rank % 2),
}


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    index, answers = mesh.get_local_rank("pp"), {}
    for name, plan in CASES.items():

        def of_pipeline(plan: Callable[[int, int], Solution] = plan) -> Solution:
            return on_all_ranks(lambda: plan(rank, index), group=mesh.get_group("pp"))

        try:
            on_all_ranks(of_pipeline, group=mesh.get_group("dp"), model=layers())
            answers[name] = "planned"
        except ValueError as error:
            answers[name] = f"{type(error).__name__}: {error}"
    dist.barrier()  # fails if a rank still waits in another collective
    os.write(1, f"{json.dumps([rank, answers])}\n".encode())


if __name__ == "__main__":
    run(work, n_processes=4)
