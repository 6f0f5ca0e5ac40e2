"""One training step, measured: peak by the allocator, seconds by events or the clock."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import turns
from benchmarks.gpu.ways import WAYS, Prepared, Setting
from benchmarks.zoo import Subject
from graphs.costs import cpu_peak_bytes
from scheduler_runtime.measuring import (
    bytes_of,
    context_bytes,
    free_unreferenced,
    resident_tensors,
    seconds_of,
)

OUT_OF_MEMORY = "out of memory"
N_WARM_UP = 3
ROW_S = 0.6
"""Steps are timed in rows of about this length."""
PREDICTED = (
    *("predicted_bytes", "planned_bytes", "predicted_reserved_bytes"),
    *("overhead", "bound", "predicted_s"),
)
"""What a row says of a plan beside the figures."""


@dataclass(frozen=True)
class Figures:
    """What one step takes; the fields with None are of CUDA alone.

    time_s: of one in a row of steps, between which nobody waits for the device.
    alone_s: of one after which the device is waited for, as by `loss.item()`: the host has no lead
        when the next one begins.
    peak_bytes: allocated, resident included; of recorded steps what the allocator holds, since
        their memory belongs to no tensor.
    reserved_bytes: what the allocator took from the device.
    context_bytes: what everything else of the process takes beside it (None where other processes
        are on the device).
    requested_bytes: the peak before the allocator rounds up.
    other_bytes: allocated between steps beside resident tensors (workspaces of cuBLAS).
    """

    peak_bytes: int
    time_s: float
    alone_s: float
    samples_per_s: float
    resident_bytes: int
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    requested_bytes: int | None = None
    other_bytes: int | None = None


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; fused on CUDA, whose step then takes no copy of the parameters."""
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)


def step_of(
    call: Callable[..., Any], batch: tuple[torch.Tensor, ...], optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        call(*batch).backward()
        optimizer.step()

    return step


def measured(
    step: Callable[[], None],
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer,
    *,
    n_timed: int = 5,
    replays: bool = False,
) -> Figures:
    """Peak of a step, and its time in a row of steps; gradients are set to None before each.

    replays: the step is a recorded one.
    """
    device = batch[0].device
    for _ in range(N_WARM_UP):
        step()
    alone_s = statistics.median(seconds_of(step, device) for _ in range(n_timed))
    n_in_row = max(1, min(10, round(ROW_S / alone_s)))

    def row() -> None:
        for _ in range(n_in_row):
            step()

    time_s = statistics.median(seconds_of(row, device) / n_in_row for _ in range(3))
    optimizer.zero_grad(set_to_none=True)
    free_unreferenced(device)
    resident = bytes_of(resident_tensors(model, batch, [optimizer]), device)
    speed = len(batch[0]) / time_s
    common: Any = {"time_s": time_s, "alone_s": alone_s, "samples_per_s": speed}
    common["resident_bytes"] = resident
    if device.type == "cuda":
        other = torch.cuda.memory_allocated(device) - resident
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        reserved = torch.cuda.max_memory_reserved(device)
        return Figures(
            peak_bytes=reserved if replays else torch.cuda.max_memory_allocated(device),
            **common,
            reserved_bytes=reserved,
            context_bytes=None if turns.are_taken() else context_bytes(device),
            requested_bytes=torch.cuda.memory_stats(device).get("requested_bytes.all.peak"),
            other_bytes=other,
        )
    return Figures(peak_bytes=resident + cpu_peak_bytes(step).peak_bytes, **common)


@contextlib.contextmanager
def limited(device: torch.device, card_bytes: int | None) -> Iterator[None]:
    """Let the process take no more than a card of that size has; no limit on the CPU.

    The allocator's limit is on what it reserves, so the context is taken off; cached blocks are
    given back when the limit is met.
    """
    if device.type != "cuda" or card_bytes is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    free_unreferenced(device)
    share = (card_bytes - context_bytes(device)) / total
    torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, share)), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def run_way(
    way: str,
    subject: Subject,
    device: torch.device,
    *,
    budget_bytes: int,
    share: float | None = None,
    reserve_bytes: int = 0,
    batch_size: int | None = None,
    card_bytes: int | None = None,
    time_limit_s: float = 30.0,
    backend: str = "inductor",
) -> dict[str, Any]:
    """A row: what the way predicted and what was measured, or why there is nothing to measure.

    card_bytes: of the card that the steps run on; plans are made with all of the device.
    """
    row: dict[str, Any] = {"way": way, "share": share, "budget_bytes": budget_bytes}
    torch.empty(0, device=device)  # its context takes a while, which nobody should wait for
    with turns.turn():
        free_unreferenced(device)
        prepared: Prepared | None = None
        try:
            model, batch = subject.made(device, batch_size=batch_size)
            optimizer = optimizer_of(model)
            setting = Setting(share, budget_bytes, optimizer, time_limit_s, backend, reserve_bytes)
            prepared = WAYS[way](model, batch, subject, setting)
            step = step_of(prepared.call, batch, optimizer)
            with limited(device, card_bytes):
                figures = measured(step, model, batch, optimizer, replays=prepared.replays)
            row |= _compared(prepared, figures)
        except torch.OutOfMemoryError:
            row["status"] = OUT_OF_MEMORY
        except (ValueError, NotImplementedError) as error:
            row |= {"status": "refused", "reason": str(error)}
        finally:
            if prepared is not None:
                prepared.undo()
    return row


def _compared(prepared: Prepared, figures: Figures) -> dict[str, Any]:
    """What was measured, beside what was predicted."""
    row = asdict(figures) | {name: getattr(prepared, name) for name in PREDICTED}
    # A recorded step has a peak of another kind, which is not compared.
    if prepared.predicted_bytes is not None and not prepared.replays:
        row["peak_off"] = prepared.predicted_bytes / figures.peak_bytes - 1.0
    if prepared.predicted_s is not None:
        row["time_off"] = prepared.predicted_s / figures.time_s - 1.0
    return row | {"status": "ran"}
