"""Tensor-parallel ranks whose steps differ: processes that test_tensor_parallel.py starts.

    python -m tests.support.tensor_disagreements

Each rank prints one line of JSON for each case: the error that it gets, and its plan.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpoint_solver.costs import Roofline
from examples.integrations.tensor_parallel import FeedForward
from examples.integrations.two_processes import run
from graphs.hardware import named
from scheduler_runtime import apply, fit
from scheduler_runtime.execute import has_checkpoints
from scheduler_runtime.export import to_torch_checkpoint
from scheduler_runtime.fitting import plans_of
from scheduler_runtime.planned import same_plan_on_ranks
from solver import Solution, solve

WIDTH, LENGTH = 32, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.down(F.gelu(F.silu(self.up(x)).sin()))
        return x.square().mean()


class Blocks(nn.Module):
    """Blocks that can be checkpointed, since each is called only once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Slower(Roofline):
    """Roofline costs in which one operator (silu) is slower by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__(named("cpu"))
        self._factor = factor

    def cost(self, call: Any) -> Any:
        cost = super().cost(call)
        is_slow = call.packet is torch.ops.aten.silu
        return dataclasses.replace(cost, time_s=cost.time_s * self._factor) if is_slow else cost


def model_on(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch_of(length: int = LENGTH) -> torch.Tensor:
    return torch.ones(2, length, WIDTH)


def planned(mesh: DeviceMesh, share: float) -> Solution:
    model = model_on(mesh)
    refused = solve(model, batch_of(), budget=1)
    above_bytes = refused.baseline.peak_bytes - refused.minimum_budget_bytes
    return solve(model, batch_of(), budget=int(refused.minimum_budget_bytes + share * above_bytes))


def other_plans(rank: int, mesh: DeviceMesh) -> None:
    model = apply(model_on(mesh), planned(mesh, 0.1 if rank else 0.9))
    model(batch_of()).backward()


def other_exports(rank: int, mesh: DeviceMesh) -> None:
    """Plans for different budgets, exported; both fit, but recompute different parts."""
    styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    model = parallelize_module(Blocks(), mesh, styles)
    refused = solve(model, batch_of(), budget=1)
    plain_bytes, least_bytes = refused.baseline.peak_bytes, refused.minimum_budget_bytes
    budget = plain_bytes if rank else (plain_bytes + least_bytes) // 2
    solution = solve(model, batch_of(), budget=budget)
    try:
        to_torch_checkpoint(model, solution, on_excess="least")
    finally:
        assert not has_checkpoints(model)


def export_fails_on_one(rank: int, mesh: DeviceMesh) -> None:
    model = model_on(mesh)
    to_torch_checkpoint(model, solve(model, batch_of(), budget=1 if rank else "1GB"))


def other_shapes(rank: int, mesh: DeviceMesh) -> None:
    model = apply(model_on(mesh), planned(mesh, 0.5), on_mismatch="error")
    model(batch_of(LENGTH // 2 if rank else LENGTH)).backward()


def other_shapes_with_fit(rank: int, mesh: DeviceMesh) -> None:
    model = fit(model_on(mesh), budget="1GB")
    model(batch_of(LENGTH // 2 if rank else LENGTH)).backward()


def later_shape(rank: int, mesh: DeviceMesh) -> None:
    """In the third step, one rank has a batch of another length: it would plan while the other rank
    runs."""
    model = fit(model_on(mesh), budget="1GB")
    for step in range(3):
        model(batch_of(LENGTH // 2 if rank and step == 2 else LENGTH)).backward()


def later_shape_with_apply(rank: int, mesh: DeviceMesh) -> None:
    model = apply(model_on(mesh), planned(mesh, 0.5), on_mismatch="replan")
    for step in range(2):
        model(batch_of(LENGTH // 2 if rank and step else LENGTH)).backward()


def known_shapes(rank: int, mesh: DeviceMesh) -> None:
    """Both ranks have plans for both lengths, but in the third step their batches differ."""
    model = fit(model_on(mesh), budget="1GB")
    for length in (LENGTH, LENGTH // 2, LENGTH // 2 if rank else LENGTH):
        model(batch_of(length)).backward()


def planned_by_one(rank: int, mesh: DeviceMesh) -> None:
    """One rank freezes a parameter, and so needs another plan for the same batch."""
    model = fit(model_on(mesh), budget="1GB")
    for step in range(3):  # the second step has gradients already, and so another plan
        if rank and step == 2:
            model.down.bias.requires_grad_(False)
        model(batch_of()).backward()


def copied_by_one(rank: int, mesh: DeviceMesh) -> None:
    """One rank trains a copy of its module, which has no programs yet but knows the other ranks."""
    model = fit(model_on(mesh), budget="1GB")
    model(batch_of()).backward()
    model.zero_grad()
    model = copy.deepcopy(model) if rank else model
    model(batch_of()).backward()


def nothing_fits_one(rank: int, mesh: DeviceMesh) -> None:
    model = fit(model_on(mesh), budget=1000 if rank else "1GB")
    model(batch_of()).backward()


def one_does_not_come(rank: int, mesh: DeviceMesh) -> None:
    model = fit(model_on(mesh), budget="1GB")
    if rank == 0:
        same_plan_on_ranks.WAIT_S = 2.0
        model(batch_of()).backward()


def other_costs(rank: int, mesh: DeviceMesh) -> str:
    """The ranks have different costs, so they must take the plan of the first rank."""
    budget = planned(mesh, 0.3).request.budget_bytes
    model = fit(model_on(mesh), budget=budget, costs=Slower(20.0 if rank else 1.0))
    model(batch_of()).backward()
    (plan,) = plans_of(model)
    return repr(plan.solution.schedule.ops)


CASES: Mapping[str, Callable[[int, DeviceMesh], Any]] = {
    each.__name__: each
    for each in (
        other_plans,
        other_exports,
        export_fails_on_one,
        other_shapes,
        other_shapes_with_fit,
        later_shape,
        later_shape_with_apply,
        known_shapes,
        planned_by_one,
        copied_by_one,
        nothing_fits_one,
        other_costs,
        one_does_not_come,
    )
}


def work(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, case in CASES.items():
        error, plan = "", None
        try:
            plan = case(rank, mesh)
        except (RuntimeError, ValueError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        found = {"case": name, "rank": rank, "error": error, "plan": plan}
        os.write(1, f"{json.dumps(found)}\n".encode())  # in one write: lines do not mix
        dist.barrier()  # the first rank must not exit early: its process has the store


if __name__ == "__main__":
    run(work)
