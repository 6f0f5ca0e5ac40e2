"""Two gloo ranks with plans that do not agree. Each prints the outcome of each case in JSON.

python -m tests.support.disagreeing_ranks
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from examples.integrations.two_processes import run
from graphs import Pipeline
from scheduler_runtime import on_all_ranks
from scheduler_runtime.execute import CheckpointedForward
from scheduler_runtime.fsdp import shard
from solver import Solution, solve

WIDTH, ROWS = 8, 16


def stage(place: Pipeline, module: nn.Module | None = None, *, budget: str = "1MB") -> Solution:
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=not place.is_first)
    module = nn.Linear(WIDTH, WIDTH) if module is None else module
    if not place.is_last:
        return solve(module, x, budget=budget, pipeline=place)
    return solve(module, x, loss=lambda y, _: y.sum(), budget=budget, pipeline=place)


def replicated(n_ranks: int | None, *, rows: int = ROWS, budget: str = "1MB") -> Solution:
    return solve(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()),
        torch.empty(rows, WIDTH, device="meta"),
        loss=lambda y, _: y.sum(),
        budget=budget,
        fsdp=n_ranks,
    )


def sharded(solution: Solution) -> Solution:
    shard(nn.Linear(WIDTH, WIDTH), solution, mesh=init_device_mesh("cpu", (2,)))
    return solution


def exported(rank: int) -> None:
    """Shard a model by the same plan on all ranks, but with its checkpoint at different modules."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[rank].forward = CheckpointedForward(model[rank])
    shard(model, replicated(2), mesh=init_device_mesh("cpu", (2,)))


def work(rank: int) -> None:
    cases = {
        "agree": lambda: stage(Pipeline(rank, 2, 4)),
        "micro-batches": lambda: stage(Pipeline(rank, 2, 4 + rank)),
        "places": lambda: stage(Pipeline(0, 2, 4)),
        "no parameters": lambda: stage(Pipeline(rank, 2, 4), nn.GELU() if rank else None),
        "nothing fits": lambda: stage(Pipeline(rank, 2, 4), budget="10B" if rank else "1MB"),
        "shapes": lambda: replicated(2, rows=ROWS + rank),
        "schedules": lambda: replicated(2, budget="4.4kB" if rank else "1MB"),
    }
    answers = {}
    for name, plan in cases.items():
        try:
            on_all_ranks(plan)
            answers[name] = "planned"
        except ValueError as error:
            answers[name] = f"{type(error).__name__}: {error}"
    unlike = replicated(2, rows=ROWS + rank), replicated(2 if rank else None)
    for name, solution in zip(("sharded shapes", "not sharded"), unlike, strict=True):
        try:
            sharded(solution)
            answers[name] = "sharded"
        except ValueError as error:
            answers[name] = f"{type(error).__name__}: {error}"
    try:
        exported(rank)
        answers["exports"] = "sharded"
    except ValueError as error:
        answers["exports"] = f"{type(error).__name__}: {error}"
    dist.barrier()  # fails if a rank still waits in another collective
    os.write(1, f"{json.dumps([rank, answers])}\n".encode())


if __name__ == "__main__":
    run(work)
