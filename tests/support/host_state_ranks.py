"""Two DDP ranks that accumulate gradients, without a plan and with optimizer state on the host."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from checkpoint_solver import fit
from scheduler_runtime.host_memory import host_blocks

N_RANKS = 2
WIDTH, N_LAYERS = 1024, 3
WEIGHT_BYTES = N_LAYERS * WIDTH * WIDTH * 4


def trained(rank: int, *, planned: bool) -> dict[str, Any]:
    """Train three steps of two micro-batches. Returns parameters, optimizer state, and bytes of the
    host memory for it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(N_LAYERS)))
    optimizer = optim.AdamW(net.parameters())
    if planned:
        options: dict[str, Any] = {"host_budget": "1GB", "host_link": "100GB/s"}
        fit(net, budget="1GB", optimizer=optimizer, optimizer_state="host", **options)
    shared = DistributedDataParallel(net)
    for step in range(3):
        optimizer.zero_grad()
        for micro, around in enumerate((shared.no_sync, contextlib.nullcontext)):
            torch.manual_seed(100 * step + 10 * micro + rank)
            with around():
                shared(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    return {
        "parameters": [p.detach() for p in net.parameters()],
        "state": [dict(optimizer.state[p]) for p in net.parameters()],
        "host_bytes": sum(block.nbytes for block in host_blocks(optimizer)),
    }


def run(rank: int, folder: str) -> None:
    """Train without and with a plan, and save both results of this rank in the folder."""
    torch.set_num_threads(1)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", rank=rank, world_size=N_RANKS, init_method=file)
    found = [trained(rank, planned=planned) for planned in (False, True)]
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
