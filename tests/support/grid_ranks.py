"""Measure FSDP2 on top of tensor parallelism: the processes that test_grids.py starts.

    python -m tests.support.grid_ranks colwise sequence

Four ranks: two rows of two tensor-parallel ranks, with FSDP2 over the rows. Each rank prints one
line of JSON for each case and plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from examples.integrations.two_processes import rank_peak_bytes, run
from graphs.trace import fake_mesh, trace
from scheduler_runtime.export import to_torch_checkpoint
from scheduler_runtime.fsdp import shard
from solver import Solution, solve
from tests.support.bitwise import are_equal
from tests.support.tensor_ranks import ROWS, Transformer, colwise, sequence

N_TENSOR, N_FSDP, N_BLOCKS, N_TOKENS, LENGTH = 2, 2, 3, 128, 64


@dataclasses.dataclass(frozen=True)
class Case:
    """A case. styles: number of blocks -> plan for `parallelize_module`. shares: the budgets, as
    shares of the range from the least budget (0) to the peak without a plan (1)."""

    styles: Callable[[int], dict[str, Any]]
    shares: tuple[float, ...] = (1.0, 0.6)


# At 0.6 the forward pass of a block would be the peak, predicted 2 % too high: without a
# rehearsal, which sharded models cannot have, a block's variables count until it returns.
CASES = {"colwise": Case(colwise), "sequence": Case(sequence, shares=(1.0, 0.63))}


def model_of(case: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(Transformer(N_TOKENS, N_BLOCKS), mesh, CASES[case].styles(N_BLOCKS))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(N_TOKENS, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plans(case: str) -> list[Solution]:
    with fake_mesh(N_TENSOR) as mesh:
        model = model_of(case, mesh)
        graph = trace(model, batch(0), optimizer=torch.optim.AdamW, fsdp=N_FSDP)
    refused = solve(graph, budget=1)
    least_bytes, plain_bytes = refused.minimum_budget_bytes, refused.baseline.peak_bytes
    return [
        solve(graph, budget=int(least_bytes + share * (plain_bytes - least_bytes)))
        for share in CASES[case].shares
    ]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, row: int) -> list[torch.Tensor]:
    """Train three steps. Returns the losses and this rank's parts of the gradients of each step,
    and its parts of the final parameters."""
    torch.manual_seed(7)
    results = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(10 * row + step))
        loss.backward()
        results += [loss.detach(), *(part(p.grad).clone() for p in model.parameters())]
        optimizer.step()
    return [*results, *(part(p).detach().clone() for p in model.parameters())]


def part(tensor: Any) -> torch.Tensor:
    return tensor.to_local()


def work(rank: int, *, solutions: Mapping[str, Sequence[Solution]]) -> None:
    mesh = init_device_mesh("cpu", (N_FSDP, N_TENSOR), mesh_dim_names=("dp", "tp"))
    row = mesh.get_local_rank("dp")
    for case, of_case in solutions.items():
        expected: list[torch.Tensor] = []
        for solution in of_case:
            model = model_of(case, mesh["tp"])
            exported = to_torch_checkpoint(model, solution, on_excess="least")
            shard(model, solution, mesh=mesh["dp"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            got = trained(model, optimizer, row)
            expected = expected or got
            found = {
                "case": case,
                "rank": rank,
                "modules": [each.path for each in exported.modules],
                "measured_bytes": rank_peak_bytes(
                    model, optimizer, batch(row), predicted_bytes=exported.peak_bytes
                ),
                "predicted_bytes": exported.peak_bytes,
                "same": are_equal(expected, got),
            }
            os.write(1, f"{json.dumps(found)}\n".encode())  # in one write: lines do not mix


def main(cases: Sequence[str]) -> None:
    solutions = {case: plans(case) for case in cases}
    run(functools.partial(work, solutions=solutions), n_processes=N_FSDP * N_TENSOR)


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(CASES))
