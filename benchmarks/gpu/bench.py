"""Measure one training step: its peak memory, and its time alone and in a row of steps."""

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
"""Duration of a row of steps, about; at most 10 steps."""
PREDICTED_FIELDS = (
    *("predicted_bytes", "planned_bytes", "predicted_reserved_bytes"),
    *("overhead", "bound", "predicted_s"),
)
"""Fields of `Prepared` (what the plan predicts) that a result has beside the measured figures."""


@dataclass(frozen=True)
class Figures:
    """Time and memory of one step; the fields that may be None are measured on CUDA only.

    time_s: of one step in a row of steps, without waiting for the device between them.
    alone_s: of a step with a wait for the device after it, as `loss.item()` does: the host is not
        ahead of the device when the next step begins.
    peak_bytes: allocated bytes at the peak, resident ones included; for steps recorded as a CUDA
        graph the reserved bytes, since their memory belongs to no tensor.
    resident_bytes: bytes of parameters, buffers, optimizer state and batch.
    reserved_bytes: most bytes that the allocator reserved on the device.
    context_bytes: device memory of the process outside of the allocator (None also if other
        processes may use the device).
    requested_bytes: the peak before the allocator rounds sizes up.
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
    """AdamW; on CUDA the fused one, whose step allocates no copy of the parameters."""
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


def measure_step(
    step: Callable[[], None],
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer,
    *,
    n_timed: int = 5,
    replays: bool = False,
) -> Figures:
    """Measure a step, which must set gradients to None first.

    n_timed: how many steps are timed alone; the median counts.
    replays: whether the step replays CUDA graphs.
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
            context_bytes=None if turns.has_other_processes() else context_bytes(device),
            requested_bytes=torch.cuda.memory_stats(device).get("requested_bytes.all.peak"),
            other_bytes=other,
        )
    return Figures(peak_bytes=resident + cpu_peak_bytes(step).peak_bytes, **common)


@contextlib.contextmanager
def limited_memory(device: torch.device, card_bytes: int | None) -> Iterator[None]:
    """Limit this process to the memory of a card of that size; no limit on the CPU.

    The allocator limits what it reserves, so the context's bytes are subtracted. It returns cached
    blocks before it fails at the limit.
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
    """Prepare the model in one way, run it, and return a row: predicted and measured figures, or
    why there are none ("status" and "reason").

    budget_bytes, share, reserve_bytes, time_limit_s, backend: see `Setting`.
    batch_size: of the batch (None: the subject's).
    card_bytes: limit the steps to a card of this size. Planning may use all of the device.
    """
    row: dict[str, Any] = {"way": way, "share": share, "budget_bytes": budget_bytes}
    torch.empty(0, device=device)  # creates the CUDA context, which takes a while, before the turn
    with turns.exclusive_turn():
        free_unreferenced(device)
        prepared: Prepared | None = None
        try:
            model, batch = subject.model_and_batch(device, batch_size=batch_size)
            optimizer = optimizer_of(model)
            setting = Setting(share, budget_bytes, optimizer, time_limit_s, backend, reserve_bytes)
            prepared = WAYS[way](model, batch, subject, setting)
            step = step_of(prepared.call, batch, optimizer)
            with limited_memory(device, card_bytes):
                figures = measure_step(step, model, batch, optimizer, replays=prepared.replays)
            row |= _result_row(prepared, figures)
        except torch.OutOfMemoryError:
            row["status"] = OUT_OF_MEMORY
        except (ValueError, NotImplementedError) as error:
            row |= {"status": "refused", "reason": str(error)}
        finally:
            if prepared is not None:
                prepared.undo()
    return row


def _result_row(prepared: Prepared, figures: Figures) -> dict[str, Any]:
    """A row of measured and predicted figures, and the relative errors of the predictions."""
    row = asdict(figures) | {name: getattr(prepared, name) for name in PREDICTED_FIELDS}
    # The peak of a recorded step is that of reserved bytes: not comparable with the prediction.
    if prepared.predicted_bytes is not None and not prepared.replays:
        row["peak_off"] = prepared.predicted_bytes / figures.peak_bytes - 1.0
    if prepared.predicted_s is not None:
        row["time_off"] = prepared.predicted_s / figures.time_s - 1.0
    return row | {"status": "ran"}
