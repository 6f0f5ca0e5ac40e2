"""Shared by the data-parallel examples: start gloo processes on the CPU, train, measure memory."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from checkpoint_solver.costs import cpu_peak_bytes
from examples import gpt2
from scheduler_runtime.measuring import no_garbage

N_PROCESSES = 2
N_STEPS = 3
N_MEASURED = (6, 30)  # least and most steps; on idle cores, 4 of 10 are measured too high
SIZES = {"batch_size": 4, "seq_length": 64, "n_tokens": 512}


def small_gpt2() -> nn.Module:
    """GPT-2 with four blocks and dropout; all processes get the same weights."""
    torch.manual_seed(0)
    return gpt2.get_model(n_layers=4, width=64, n_heads=4, n_tokens=512, max_length=64, dropout=0.1)


def train(model: nn.Module, rank: int) -> tuple[list[torch.Tensor], int]:
    """Train a few steps with AdamW, on different batches in each process.

    Returns the losses and this process's part of the last gradients, and the peak of a further
    forward and backward pass, in bytes above what was live before.
    """
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        loss = model(*gpt2.get_batch(**SIZES))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [g.to_local() if isinstance(g, DTensor) else g for g in found]
    results = [each.clone() for each in (*losses, *gradients)]
    optimizer.zero_grad()
    batch = gpt2.get_batch(**SIZES)
    return results, cpu_peak_bytes(lambda: model(*batch).backward()).peak_bytes


def compare(plain: nn.Module, exported: nn.Module, rank: int) -> None:
    """Train both models and print whether they agree; exit with 1 if not."""
    expected, plain_bytes = train(plain, rank)
    got, exported_bytes = train(exported, rank)
    same = all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    print(
        f"rank {rank}: losses and gradients {'are the same bits' if same else 'DIFFER'}; the step "
        f"took {plain_bytes} bytes without and {exported_bytes} with checkpointing",
        flush=True,
    )
    if not same:
        raise SystemExit(1)


def rank_peak_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[torch.Tensor],
    *,
    predicted_bytes: int = 0,
) -> int:
    """The peak of this process's tensors in a step, with the bytes that are live before it: its
    part of parameters and optimizer state, buffers and batch.

    optimizer: must have stepped before, so that it has its state.
    predicted_bytes: the predicted peak.

    Returns the least of many measured steps: gloo's threads may free their copies a moment after
    the process has gone on, which makes a peak too high, never too low. Stops early when every
    rank has measured a step of at most `predicted_bytes`; all ranks must run the same number of
    steps, since they wait for each other.
    """
    state = [item for each in optimizer.state.values() for item in each.values()]
    held = [*model.parameters(), *model.buffers(), *state, *batch]
    tensors = [item.to_local() if isinstance(item, DTensor) else item for item in held]
    storages = {each.untyped_storage().data_ptr(): each for each in tensors}
    resident_bytes = sum(each.untyped_storage().nbytes() for each in storages.values())

    def step() -> None:
        model(*batch).backward()
        optimizer.step()

    taken = []
    least, most = N_MEASURED
    for n in range(1, most + 1):
        optimizer.zero_grad()
        with no_garbage(torch.device("cpu")):
            taken.append(cpu_peak_bytes(step).peak_bytes)
        if n >= least and all_ranks(min(taken) + resident_bytes <= predicted_bytes):
            break
    optimizer.zero_grad()
    return min(taken) + resident_bytes


def all_ranks(holds: bool) -> bool:
    """Whether `holds` is true on all ranks."""
    answers = torch.tensor([int(holds)])
    dist.all_reduce(answers, op=dist.ReduceOp.MIN)
    return bool(answers.item())


def run(work: Callable[[int], None], *, n_processes: int = N_PROCESSES) -> None:
    """Call `work(rank)` in each process of a gloo group: in torchrun's processes, or else in new
    ones.

    work: a function at module level, which can be pickled.

    Raises ValueError if torchrun has another number of processes.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo may wait for a name server
    if dist.is_torchelastic_launched():
        if int(os.environ["WORLD_SIZE"]) != n_processes:
            raise ValueError(f"this script is for {n_processes} processes: --nproc-per-node")
        _in_group(int(os.environ["RANK"]), "env://", work, n_processes)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    torch.multiprocessing.spawn(_in_group, args=(address, work, n_processes), nprocs=n_processes)


def _in_group(rank: int, address: str, work: Callable[[int], None], n_processes: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # so that the many collections do not scan torch's own objects again and again
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=n_processes)
    try:
        work(rank)
    finally:
        dist.destroy_process_group()
