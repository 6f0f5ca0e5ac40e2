"""What a training step really takes: peak bytes and seconds, beside what was predicted.

On the CPU the profiler's memory events are added up (they agree with a malloc hook within 0.1 MB);
on CUDA the allocator's peak counts. What is there before the step (parameters, buffers, optimizer
state, accumulated gradients, batch) is added by size, storage by storage.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.calls import as_call, check_call, device_of, find_loss, nested
from graphs.costs import cpu_peak_bytes


@dataclass(frozen=True)
class Measurement:
    """peak_bytes: the most on the device during the step, resident included. time_s: the median
    of the steps timed without a profiler; spread_s: the slowest less the fastest. reserved_bytes:
    what CUDA's allocator took from the device; context_bytes: what was taken of it beside that, by
    contexts, kernels and other processes (None on the CPU)."""

    peak_bytes: int
    time_s: float
    spread_s: float = 0.0
    reserved_bytes: int | None = None
    context_bytes: int | None = None


def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    gradients: str = "fresh",
    n_steps: int = 3,
) -> Measurement:
    """Run training steps and measure them. The model's parameters change if there is an optimizer.

    The first step warms up (the optimizer makes its state then), `n_steps` are timed, one more is
    measured for memory. loss, inputs: as in `graphs.trace.trace`. gradients: "fresh" (set to None
    before each step) or "accumulate". Raises TraceError for a batch that the model does not take.
    """
    if gradients not in ("fresh", "accumulate"):
        raise ValueError(f"gradients is {gradients!r}; 'fresh' or 'accumulate'")
    step = _step(model, batch, loss, inputs, optimizer)
    device = device_of(model)

    def clear() -> None:
        if gradients == "fresh":
            for parameter in model.parameters():
                parameter.grad = None

    clear()
    step()
    times_s = []
    for _ in range(n_steps):
        clear()
        times_s.append(seconds_of(step, device))
    clear()
    resident = bytes_of(
        resident_tensors(model, batch, () if optimizer is None else (optimizer,)), device
    )
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # else what an earlier run left would be reserved here
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return Measurement(
            peak_bytes=torch.cuda.max_memory_allocated(device),
            time_s=statistics.median(times_s),
            spread_s=max(times_s) - min(times_s),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            context_bytes=context_bytes(device),
        )
    used = cpu_peak_bytes(step)
    return Measurement(
        peak_bytes=resident + used.peak_bytes,
        time_s=statistics.median(times_s),
        spread_s=max(times_s) - min(times_s),
    )


def context_bytes(device: torch.device) -> int:
    """What is taken of the device beside this process's allocator: contexts, kernels, others."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], torch.Tensor] | None,
    inputs: Callable[[Any], Any] | None,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[], None]:
    """One training step as people write it: the output is held until the step is over."""
    args, kwargs = as_call(batch, inputs)
    check_call(model, args, kwargs)

    def step() -> None:
        output = model(*args, **kwargs)
        value = find_loss(output) if loss is None else loss(output, batch)
        value.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """By the host's clock, until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


def peak_above_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that a run takes on the device above what is there when it starts."""
    if device.type != "cuda":
        return cpu_peak_bytes(run).peak_bytes
    peaks = CudaPeaks(device)
    peaks.begin("all")
    run()
    return peaks.ended()["all"]


class CudaPeaks:
    """By the allocator: the most that each part of a run takes above that part's start.

    `begin` opens a part and ends the one before; of several of one name the most is told. Nothing
    waits for the device: the allocator counts when the host hands work over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, int] = {}
        self._part: str | None = None
        self._start_bytes = 0

    def begin(self, part: str) -> None:
        if part == self._part:
            return
        self._note()
        self._part = part
        self._start_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def ended(self) -> dict[str, int]:
        self._note()
        self._part = None
        return self._peaks

    def _note(self) -> None:
        if self._part is not None:
            peak = torch.cuda.max_memory_allocated(self._device) - self._start_bytes
            self._peaks[self._part] = max(peak, self._peaks.get(self._part, 0))


def resident_tensors(
    model: nn.Module, batch: Any, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """What a step keeps and that is there already; some of them may share storage."""
    yield from model.parameters()
    yield from model.buffers()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from nested.tensors((batch, [list(each.state.values()) for each in optimizers]))


def bytes_of(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on this device (of several, with its index), each once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t.device == device
    }
    return sum(storages.values())
