"""Planned stages under torch.distributed.pipelining, measured: the processes of test_pipelines.py.

    python -m tests.support.pipeline_ranks 1f1b 2
    python -m tests.support.pipeline_ranks gpipe 2

Each rank runs a step of the plain and of the planned stage, and prints one line of JSON.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from examples.integrations.two_processes import run
from graphs import Pipeline
from graphs.costs import cpu_peak_bytes
from scheduler_runtime import apply
from solver import Solution, solve

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
N_MICROBATCHES, ROWS, WIDTH, N_BLOCKS = 4, 128, 64, 2
SHARE = 0.6
"""Of what the plain step takes above what is resident: the budget."""


class Block(nn.Module):
    """Dropout draws, and batch norm changes its buffers in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(F.gelu(self.wide(self.norm(x)))))


def stage_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(*(Block() for _ in range(N_BLOCKS)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def planned_solution(stage: nn.Module, pipeline: Pipeline) -> Solution:
    """A plan for SHARE of the memory; made from meta tensors alone."""
    stage = copy.deepcopy(stage).to("meta")
    x = torch.empty(ROWS, WIDTH, device="meta", requires_grad=not pipeline.is_first)
    options: dict[str, object] = {"pipeline": pipeline, "optimizer": torch.optim.AdamW}
    batch: object = x
    if pipeline.is_last:
        batch = (x, torch.empty(ROWS, WIDTH, device="meta"))
        options |= {"inputs": lambda b: b[0], "loss": lambda output, b: loss_of(output, b[1])}
    plain = solve(stage, batch, budget="1GB", **options)
    resident_bytes = plain.graph.resident_bytes
    budget = resident_bytes + int(SHARE * (plain.baseline.peak_bytes - resident_bytes))
    return solve(stage, batch, budget=budget, **options)


def trained(stage: nn.Module, pipeline: Pipeline) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients and buffers of three steps; the most that this rank held in a fourth."""
    rank = pipeline.stage
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    example = torch.empty(ROWS, WIDTH)
    runner = PipelineStage(
        stage,
        rank,
        pipeline.n_stages,
        torch.device("cpu"),
        input_args=example.clone().requires_grad_(not pipeline.is_first),
        output_args=example.clone().requires_grad_(),
    )
    schedule = SCHEDULES[pipeline.schedule](
        runner, n_microbatches=pipeline.n_microbatches, loss_fn=loss_of
    )
    generator = torch.Generator().manual_seed(7)
    data = [torch.randn(pipeline.n_microbatches * ROWS, WIDTH, generator=generator) for _ in "xy"]
    here = [
        each
        for each, there in zip(data, (pipeline.is_first, pipeline.is_last), strict=True)
        if there
    ]
    results: list[torch.Tensor] = []

    def step() -> None:
        losses: list[torch.Tensor] = []
        args = (data[0],) if pipeline.is_first else ()
        target = {"target": data[1], "losses": losses} if pipeline.is_last else {}
        schedule.step(*args, **target, return_outputs=False)
        optimizer.step()
        results.extend(loss.detach() for loss in losses)

    for _ in range(3):
        optimizer.zero_grad()
        step()
        results += [p.grad.clone() for p in stage.parameters() if p.grad is not None]
    results += [buffer.clone() for buffer in stage.buffers()]
    n_results = len(results)
    optimizer.zero_grad()
    taken_bytes = cpu_peak_bytes(step).peak_bytes
    del results[n_results:]
    buffers = [
        info.buffer
        for of_all in (runner.args_recv_info, runner.grad_recv_info)
        for infos in of_all.values()
        for info in infos
        if info.buffer is not None
    ]
    state = [item for each in optimizer.state.values() for item in each.values()]
    held = [*stage.parameters(), *stage.buffers(), *state, *buffers, *here]
    storages = {each.untyped_storage().data_ptr(): each for each in held}
    return results, taken_bytes + sum(s.untyped_storage().nbytes() for s in storages.values())


def work(rank: int, *, schedule: str, n_ranks: int) -> None:
    pipeline = Pipeline(rank, n_ranks, N_MICROBATCHES, schedule)
    stage = stage_of(rank)
    solution = planned_solution(stage, pipeline)
    assert solution.simulation is not None, solution
    plain, plain_bytes = trained(copy.deepcopy(stage), pipeline)
    got, planned_bytes = trained(apply(stage, solution), pipeline)
    found = {
        "stage": rank,
        "same": len(plain) == len(got) and all(map(torch.equal, plain, got)),
        "n_results": len(plain),
        "n_in_flight": solution.graph.n_in_flight,
        "n_recomputed": solution.simulation.n_recomputed,
        "plain_measured_bytes": plain_bytes,
        "plain_predicted_bytes": solution.baseline.peak_bytes,
        "measured_bytes": planned_bytes,
        "predicted_bytes": solution.simulation.peak_bytes,
    }
    os.write(1, f"{json.dumps(found)}\n".encode())  # whole lines, from several processes


if __name__ == "__main__":
    name, n = sys.argv[1], int(sys.argv[2])
    run(functools.partial(work, schedule=name, n_ranks=n), n_processes=n)
