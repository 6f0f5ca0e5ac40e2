"""Measure planned stages in torch.distributed.pipelining: the processes test_pipelines.py starts.

    python -m tests.support.pipeline_ranks 1f1b 2
    python -m tests.support.pipeline_ranks gpipe 2
    python -m tests.support.pipeline_ranks interleaved 2
    python -m tests.support.pipeline_ranks gpipe 2 wide

Each rank runs steps of its stages with and without plans, and prints one line of JSON. With
"interleaved", a rank has two stages.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor

from examples.integrations.two_processes import N_MEASURED, all_ranks, run
from graphs import Pipeline
from graphs.costs import cpu_peak_bytes
from scheduler_runtime import apply
from scheduler_runtime.measuring import no_garbage
from solver import Solution, rank_peak_bytes, share_rank_budget, solve
from tests.support.bitwise import are_equal

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}
N_MICROBATCHES, N_BLOCKS = 4, 2


@dataclass(frozen=True)
class Shape:
    """A case. size: shape of a micro-batch. share: the budget is the resident bytes plus this share
    of what a step without a plan takes above them."""

    size: tuple[int, ...]
    share: float

    @property
    def width(self) -> int:
        return self.size[-1]


SHAPES = {
    "": Shape((128, 64), share=0.6),
    # gradients take more than a micro-batch saves, so the peak is in the second backward pass
    "wide": Shape((64, 256), share=0.85),
}


class Block(nn.Module):
    """Dropout draws random numbers, and batch norm changes its buffers, in each forward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.narrow(F.gelu(self.wide(self.norm(x)))))


def stage_of(index: int, shape: Shape) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(*(Block(shape.width) for _ in range(N_BLOCKS)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def planned_solutions(
    stages: Sequence[nn.Module], pipelines: Sequence[Pipeline], shape: Shape
) -> Sequence[Solution]:
    """Plans of a rank's stages, for a budget that they share; made on the meta device."""
    places = list(zip(stages, pipelines, strict=True))
    plain = [solved(*each, shape, budget=10**9) for each in places]
    resident_bytes = max(each.graph.resident_bytes for each in plain)
    most_bytes = rank_peak_bytes(plain)
    budget = resident_bytes + int(shape.share * (most_bytes - resident_bytes))
    return share_rank_budget([solved(*each, shape, budget=budget) for each in places])


def solved(stage: nn.Module, pipeline: Pipeline, shape: Shape, *, budget: int) -> Solution:
    stage = copy.deepcopy(stage).to("meta")
    x = torch.empty(shape.size, device="meta", requires_grad=not pipeline.is_first)
    options: dict[str, object] = {"pipeline": pipeline, "optimizer": torch.optim.AdamW}
    batch: object = x
    if pipeline.is_last:
        batch = (x, torch.empty(shape.size, device="meta"))
        options |= {"inputs": lambda b: b[0], "loss": lambda output, b: loss_of(output, b[1])}
    return solve(stage, batch, budget=budget, **options)


def trained(
    stages: Sequence[nn.Module],
    pipelines: Sequence[Pipeline],
    shape: Shape,
    predicted_bytes: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[torch.Tensor], int]:
    """Train three steps. Returns losses, gradients and buffers of this rank, and the peak of its
    tensors in a further step, measured as by `two_processes.rank_peak_bytes`.

    group: the ranks of the pipeline (None: all ranks).
    """
    model, first, last = nn.ModuleList(stages), pipelines[0], pipelines[-1]
    torch.manual_seed(10 + first.stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    example = torch.empty(shape.size)
    runners = [
        PipelineStage(
            stage,
            pipeline.stage,
            pipeline.n_stages,
            torch.device("cpu"),
            input_args=example.clone().requires_grad_(not pipeline.is_first),
            output_args=example.clone().requires_grad_(),
            group=group,
        )
        for stage, pipeline in zip(stages, pipelines, strict=True)
    ]
    schedule = SCHEDULES[first.schedule](
        runners if first.schedule == "interleaved" else runners[0],
        n_microbatches=first.n_microbatches,
        loss_fn=loss_of,
    )
    generator = torch.Generator().manual_seed(7)
    whole = (first.n_microbatches * shape.size[0], *shape.size[1:])
    data = [torch.randn(whole, generator=generator) for _ in "xy"]
    here = [each for each, there in zip(data, (first.is_first, last.is_last), strict=True) if there]
    results: list[torch.Tensor] = []

    def step() -> None:
        losses: list[torch.Tensor] = []
        args = (data[0],) if first.is_first else ()
        target = {"target": data[1], "losses": losses} if last.is_last else {}
        schedule.step(*args, **target, return_outputs=False)
        optimizer.step()
        results.extend(loss.detach() for loss in losses)

    for _ in range(3):
        optimizer.zero_grad()
        step()
        results += [part(p.grad).clone() for p in model.parameters() if p.grad is not None]
    results += [buffer.clone() for buffer in model.buffers()]
    n_results = len(results)
    buffers = [
        info.buffer
        for runner in runners
        for of_all in (runner.args_recv_info, runner.grad_recv_info)
        for infos in of_all.values()
        for info in infos
        if info.buffer is not None
    ]
    state = [item for each in optimizer.state.values() for item in each.values()]
    held = [*map(part, (*model.parameters(), *state)), *model.buffers(), *buffers, *here]
    storages = {each.untyped_storage().data_ptr(): each for each in held}
    held_bytes, taken = sum(s.untyped_storage().nbytes() for s in storages.values()), []
    least, most = N_MEASURED
    for n in range(1, most + 1):
        optimizer.zero_grad()
        with no_garbage(torch.device("cpu")):
            taken.append(cpu_peak_bytes(step).peak_bytes)
        del results[n_results:]
        if n >= least and all_ranks(min(taken) + held_bytes <= predicted_bytes):
            break
    return results, min(taken) + held_bytes


def part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be split over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def work(rank: int, *, schedule: str, n_ranks: int, shape: Shape) -> None:
    n_each = 2 if schedule == "interleaved" else 1
    pipelines = [
        Pipeline(index, n_ranks * n_each, N_MICROBATCHES, schedule, n_each)
        for index in range(rank, n_ranks * n_each, n_ranks)
    ]
    stages = [stage_of(pipeline.stage, shape) for pipeline in pipelines]
    solutions = planned_solutions(stages, pipelines, shape)
    simulations = [found.simulation for found in solutions if found.simulation is not None]
    plain_predicted_bytes = max(found.baseline.peak_bytes for found in solutions)
    plain, plain_bytes = trained(copy.deepcopy(stages), pipelines, shape, plain_predicted_bytes)
    planned = [apply(*each) for each in zip(stages, solutions, strict=True)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got, planned_bytes = trained(planned, pipelines, shape, rank_peak_bytes(solutions))
    found = {
        "stage": rank,
        "same": are_equal(plain, got),
        "n_results": len(plain),
        "n_in_flight": solutions[0].graph.n_in_flight,
        "n_recomputed": min(each.n_recomputed for each in simulations),
        "plain_measured_bytes": plain_bytes,
        "plain_predicted_bytes": plain_predicted_bytes,
        "measured_bytes": planned_bytes,
        "predicted_bytes": rank_peak_bytes(solutions),
        "warnings": [str(each.message) for each in told if "apply" in str(each.message)],
    }
    os.write(1, f"{json.dumps(found)}\n".encode())  # in one write: lines do not mix


if __name__ == "__main__":
    name, n, shape = sys.argv[1], int(sys.argv[2]), SHAPES[(sys.argv[3:] or [""])[0]]
    run(functools.partial(work, schedule=name, n_ranks=n, shape=shape), n_processes=n)
