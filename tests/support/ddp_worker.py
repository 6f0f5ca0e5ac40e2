"""One of the two data-parallel processes that test_data_parallel.py starts.

python -m tests.support.ddp_worker RANK RENDEZVOUS_FILE OUT_FILE
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphs.graph import Graph
from scheduler_runtime import fit, plans_of
from tests.support.full_device import FailingOperators

N_PROCESSES = 2


class Net(nn.Module):
    """A model with dropout and with buffers, which DDP broadcasts; the caller computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 16))
            for _ in range(4)
        )
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(x)


def train(
    rank: int,
    *,
    budget_bytes: int | None,
    of_fit: Mapping[str, Any] | None = None,
    failing: Mapping[int, int] | None = None,
    set_to_none: bool = True,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Train three steps of two micro-batches. Returns the losses with the last gradients,
    parameters and buffers, and descriptions of the plans.

    budget_bytes: for `fit` (None: without a plan).
    of_fit: further options of `fit`.
    failing: step -> index of the operator in its second micro-batch that runs out of memory.
    set_to_none: of `zero_grad`.
    options: of DistributedDataParallel.
    """
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01, **options)
    if budget_bytes is not None:
        fit(model, budget=budget_bytes, optimizer=optimizer, **(of_fit or {}))
    torch.manual_seed(rank)
    results: list[Any] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad(set_to_none)
        with parallel.no_sync():
            F.cross_entropy(parallel(torch.randn(64, 16, generator=generator)), TARGETS).backward()
        inputs = torch.randn(64, 16, generator=generator)
        with nullcontext() if step not in (failing or {}) else FailingOperators([failing[step]]):
            loss = F.cross_entropy(parallel(inputs), TARGETS)
            loss.backward()
        optimizer.step()
        results.append(loss.detach())
    results += [p.grad for p in model.parameters()]
    results += [*(p.detach() for p in model.parameters()), *model.buffers()]
    plans = [] if budget_bytes is None else [described(plan) for plan in plans_of(model)]
    return results, plans


TARGETS = torch.arange(64) % 5
IN_FORWARD, IN_BACKWARD = 30, 90


def described(plan: Any) -> dict[str, Any]:
    solution = plan.solution
    return {
        "n_recomputed": solution.simulation.n_recomputed,
        "host_bytes": solution.simulation.host_peak_bytes,
        "disk_bytes": solution.simulation.disk_peak_bytes,
        "resident_bytes": solution.graph.resident_bytes - loss_held_bytes(solution.graph),
        "gradients": solution.environment["gradients"],
        "notes": plan.notes,
    }


def loss_held_bytes(graph: Graph) -> int:
    """Bytes that the loss outside of the model holds. They are guessed until a step has run, so
    comparisons leave them out."""
    return sum(tensor.size_bytes for tensor in graph.tensors if tensor.name == "loss.held")


def main() -> None:
    rank, rendezvous, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=N_PROCESSES
    )
    torch.manual_seed(0)
    single = fit(Net(), budget="1GB", optimizer=[])
    single(torch.randn(64, 16))
    found: dict[str, Any] = {
        "gradients_bytes": sum(p.nbytes for p in single.parameters()),
        "alone": [described(plan) for plan in plans_of(single)],
    }
    for name, options in (
        ("copies", {}),
        ("views", {"gradient_as_bucket_view": True}),
        ("kept views", {"gradient_as_bucket_view": True, "set_to_none": False}),
        ("unused", {"find_unused_parameters": True}),
    ):
        plain, _ = train(rank, budget_bytes=None, **options)
        fitted, plans = train(rank, budget_bytes=400_000, **options)
        found[name] = {"plain": plain, "fitted": fitted, "plans": plans}
    host = {"host_budget": "1GB", "host_link": "1TB/s"}
    fitted, plans = train(rank, budget_bytes=400_000, of_fit=host)
    found["host"] = {"plain": found["copies"]["plain"], "fitted": fitted, "plans": plans}
    directory = Path(out).parent / "disk"  # shared by both processes
    directory.mkdir(exist_ok=True)
    disk = {"disk_budget": f"1GB:{directory}", "disk_rate": 1e14}
    behind = {"host_budget": 40_000, "host_link": 1e14, "time_limit_s": 600, **disk}
    fitted, plans = train(rank, budget_bytes=340_000, of_fit=behind)
    found["disk"] = {"plain": found["copies"]["plain"], "fitted": fitted, "plans": plans}
    found["left on the disk"] = list(map(str, directory.iterdir()))
    fitted, plans = train(
        rank,
        budget_bytes=10_000_000,
        of_fit={"on_pressure": "replan"},
        failing={1: IN_FORWARD, 2: IN_BACKWARD} if rank == 1 else {},
    )
    found["short"] = {"plain": found["copies"]["plain"], "fitted": fitted, "plans": plans}
    torch.save(found, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
