"""Measure pipeline stages of tensor-parallel blocks: the processes test_tensor_stages.py starts.

    python -m tests.support.tensor_stage_ranks 1f1b gpipe

Four ranks: two stages, each split over two ranks. Each rank sends to the rank at the same place in
the other stage, and prints one line of JSON for each schedule.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from examples.integrations.two_processes import run
from graphs import Pipeline
from scheduler_runtime import apply, on_all_ranks
from solver import Solution
from tests.support.bitwise import are_equal
from tests.support.pipeline_ranks import N_MICROBATCHES, Shape, solved, trained
from tests.support.tensor_ranks import N_HEADS, Block, colwise

N_STAGES, N_TENSOR, N_BLOCKS = 2, 2, 1
SHAPE = Shape((4, 32, 64), share=0.5)


class Stage(nn.Module):
    """Transformer blocks with dropout, whose matrices are split over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(SHAPE.width, N_HEADS) for _ in range(N_BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def stage_of(index: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(index)
    return parallelize_module(Stage(), mesh, colwise(N_BLOCKS))


def plan(stage: nn.Module, place: Pipeline) -> Solution:
    """A plan whose budget is at SHAPE.share between the least budget (0) and the peak without a
    plan (1)."""
    refused = solved(stage, place, SHAPE, budget=1)
    least_bytes, plain_bytes = refused.minimum_budget_bytes, refused.baseline.peak_bytes
    budget = least_bytes + int(SHAPE.share * (plain_bytes - least_bytes))
    return solved(stage, place, SHAPE, budget=budget)


def work(rank: int, *, schedules: Sequence[str]) -> None:
    mesh = init_device_mesh("cpu", (N_STAGES, N_TENSOR), mesh_dim_names=("pp", "tp"))
    index, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    for schedule in schedules:
        place = Pipeline(index, N_STAGES, N_MICROBATCHES, schedule)
        stage = stage_of(index, mesh["tp"])
        of_column = functools.partial(
            on_all_ranks, functools.partial(plan, stage, place), group=group
        )
        solution = on_all_ranks(of_column, group=mesh.get_group("tp"), model=stage)
        plain_bytes, planned_bytes = solution.baseline.peak_bytes, solution.simulation.peak_bytes
        plain, plain_measured = trained([copy.deepcopy(stage)], [place], SHAPE, plain_bytes, group)
        got, measured = trained([apply(stage, solution)], [place], SHAPE, planned_bytes, group)
        found = {
            "rank": rank,
            "schedule": schedule,
            "n_in_flight": solution.graph.n_in_flight,
            "n_recomputed": solution.simulation.n_recomputed,
            "n_results": len(got),
            "same": are_equal(plain, got),
            "plain_measured_bytes": plain_measured,
            "plain_predicted_bytes": plain_bytes,
            "measured_bytes": measured,
            "predicted_bytes": planned_bytes,
        }
        os.write(1, f"{json.dumps(found)}\n".encode())  # in one write: lines do not mix


if __name__ == "__main__":
    run(functools.partial(work, schedules=sys.argv[1:]), n_processes=N_STAGES * N_TENSOR)
