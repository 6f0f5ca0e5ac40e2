"""Two ranks of a pipeline that begin different steps. Each prints the outcome of each case in JSON.

python -m tests.support.steps_of_ranks
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from examples.integrations.two_processes import run
from graphs import Pipeline
from scheduler_runtime import apply, steps_together
from solver import Solution, solve

WIDTH, ROWS, N_MICROBATCHES = 16, 32, 4


def plan(stage: nn.Module, place: Pipeline) -> Solution:
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=not place.is_first)
    if place.is_first:
        return solve(stage, x, budget="10MB", pipeline=place)
    batch = (x, torch.empty(ROWS, WIDTH, device="meta"))
    loss = {"inputs": lambda b: b[0], "loss": lambda y, b: F.mse_loss(y, b[1])}
    return solve(stage, batch, budget="10MB", pipeline=place, **loss)


def trained(
    rank: int,
    *,
    rows: tuple[int, int] = (ROWS, ROWS),
    target_rows: tuple[int, int] = (ROWS, ROWS),
    kind: Any = Schedule1F1B,
    n_microbatches: int = N_MICROBATCHES,
) -> None:
    """Train two steps. rows, target_rows: rows of a micro-batch in each step."""
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    apply(stage, plan(stage, Pipeline(rank, 2, N_MICROBATCHES)))
    runner = PipelineStage(
        stage,
        rank,
        2,
        torch.device("cpu"),
        input_args=torch.empty(ROWS, WIDTH, requires_grad=rank > 0),
        output_args=torch.empty(ROWS, WIDTH, requires_grad=True),
    )
    schedule = steps_together(kind(runner, n_microbatches=n_microbatches, loss_fn=F.mse_loss))
    for n, n_targets in zip(rows, target_rows, strict=True):
        if rank == 0:
            schedule.step(torch.randn(N_MICROBATCHES * n, WIDTH), return_outputs=False)
        else:
            target = torch.randn(N_MICROBATCHES * n_targets, WIDTH)
            schedule.step(target=target, losses=[], return_outputs=False)


CASES: dict[str, Mapping[int, Mapping[str, Any]]] = {
    "agree": {},
    "first shape": {0: {"rows": (ROWS // 2, ROWS)}},
    "later shape": {0: {"rows": (ROWS, ROWS // 2)}},
    "later targets": {1: {"target_rows": (ROWS, ROWS // 2)}},
    "schedule": {1: {"kind": ScheduleGPipe}},
    "micro-batches": {0: {"n_microbatches": 2}},
    "agree at last": {},
}


def work(rank: int) -> None:
    answers = {}
    for name, unlike in CASES.items():
        try:
            trained(rank, **unlike.get(rank, {}))
            answers[name] = "trained"
        except ValueError as error:
            answers[name] = f"{type(error).__name__}: {error}"
    os.write(1, f"{json.dumps([rank, answers])}\n".encode())


if __name__ == "__main__":
    run(work, n_processes=2)
