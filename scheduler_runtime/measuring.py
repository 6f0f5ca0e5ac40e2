"""Run real training steps, and measure their peak memory and time.

On the CPU the profiler's memory events are added up (they agree with a malloc hook within 0.1 MB);
on CUDA the allocator's peak counts. What is there before the step (parameters, buffers, optimizer
state, accumulated gradients, batch) is added by size, storage by storage.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from graphs.costs import CudaPeaks, cpu_peak_bytes
from graphs.model_calls import (
    TraceError,
    as_call,
    check_call,
    device_of,
    find_loss,
    local_part,
    nested,
)
from graphs.training_step import GivenOptimizer, read_optimizer
from scheduler_runtime.execute import ReplacedForward, nothing_watches
from scheduler_runtime.host_memory import host_blocks
from solver.sizes_deadlines_progress import names_checked


@dataclass(frozen=True)
class Measurement:
    """What a training step took.

    peak_bytes: the most on the device during the step, resident bytes included.
    time_s: median of the steps timed without a profiler, which took times_s.
    spread_s: the slowest of them less the fastest.
    reserved_bytes: what CUDA's allocator took from the device (None on the CPU).
    context_bytes: what else was taken of the device, by contexts, kernels and other processes.
    """

    peak_bytes: int
    time_s: float
    spread_s: float = 0.0
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    times_s: tuple[float, ...] = ()


@dataclass(eq=False)
class TrainingStep:
    """A training step as people write it, to be run several times.

    batch, loss, inputs: as in `graphs.trace.trace`.
    optimizer: its step is part of `run` (None: forward and backward pass only).
    autocast: dtype of the forward pass and the loss (None: no autocast).

    Raises TraceError for a batch that the model does not take.
    """

    model: nn.Module
    batch: Any
    _: KW_ONLY
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    inputs: Callable[[Any], Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.args, self.kwargs = as_call(self.batch, self.inputs)
        check_call(self.model, self.args, self.kwargs)
        self._output: Any = None

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def forward(self) -> torch.Tensor:
        """The loss. The model's output is held meanwhile, as by a loop that gives it a name."""
        self.release()
        on = self.autocast is not None
        with torch.autocast(self.device.type, self.autocast) if on else contextlib.nullcontext():
            self._output = self.model(*self.args, **self.kwargs)
            if self.loss is None:
                return find_loss(self._output)
            loss = self.loss(self._output, self.batch)
        if not isinstance(loss, torch.Tensor):
            raise TraceError(
                f"the loss function returned a {type(loss).__name__}; it must return a tensor: "
                "loss=lambda output, batch: ..."
            )
        return loss

    def run(self) -> torch.Tensor:
        """One step; returns its loss. Gradients add up."""
        loss = self.forward()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.release()
        return loss

    def release(self) -> None:
        """Let go of the model's output."""
        self._output = None

    def clear_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


@names_checked
def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: GivenOptimizer | None = None,
    autocast: torch.dtype | None = None,
    gradients: str = "fresh",
    n_steps: int = 3,
) -> Measurement:
    """Run training steps and measure them. An optimizer changes the model's parameters.

    loss, inputs: as in `graphs.trace.trace`.
    optimizer: as in `graphs.trace.trace`. autocast: as in `TrainingStep`.
    gradients: "fresh" (set to None before each step) or "accumulate".
    n_steps: how many are timed; one before them warms up (the optimizer creates its state then),
        and memory is measured on one after them.

    Raises TraceError for a batch that the model does not take.
    """
    (found,) = measure_in_turns(
        model,
        batch,
        (contextlib.nullcontext,),
        loss=loss,
        inputs=inputs,
        optimizer=optimizer,
        autocast=autocast,
        gradients=gradients,
        n_steps=n_steps,
    )
    return found


@nothing_watches()  # a loss that has not been run backward yet
def measure_in_turns(
    model: nn.Module,
    batch: Any,
    sides: Sequence[Callable[[], contextlib.AbstractContextManager[Any]]],
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: GivenOptimizer | None = None,
    autocast: torch.dtype | None = None,
    gradients: str = "fresh",
    n_steps: int = 3,
) -> list[Measurement]:
    """As `measure`, within each of several contexts, whose timed steps take turns: what else the
    machine does, and how fast it runs, changes with time and is then the same for all."""
    if gradients not in ("fresh", "accumulate"):
        raise ValueError(f"gradients is {gradients!r}; 'fresh' or 'accumulate'")
    own = None if optimizer is None else read_optimizer(optimizer, model)
    step = TrainingStep(model, batch, loss=loss, inputs=inputs, optimizer=own, autocast=autocast)
    device = step.device
    is_cuda = device.type == "cuda"
    times_s: list[list[float]] = [[] for _ in sides]
    for _ in range(1 + n_steps):
        for side, of_side in zip(sides, times_s, strict=True):
            if gradients == "fresh":
                step.clear_gradients()
            with side():
                of_side.append(seconds_of(step.run, device))
    optimizers = () if own is None else (own,)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    planned = [forward for forward in forwards if isinstance(forward, ReplacedForward)]
    constants = [tensor for forward in planned for tensor in forward.constants()]
    found = []
    for side, (_, *timed_s) in zip(sides, times_s, strict=True):
        if gradients == "fresh":
            step.clear_gradients()
        emptied(device)  # else what an earlier run left would count as reserved here
        with side():
            resident = [*resident_tensors(model, batch, optimizers), *constants]
            peak_bytes = absolute_peak_bytes(step.run, device, resident)
        found.append(
            Measurement(
                peak_bytes=peak_bytes,
                time_s=statistics.median(timed_s),
                spread_s=max(timed_s) - min(timed_s),
                reserved_bytes=torch.cuda.max_memory_reserved(device) if is_cuda else None,
                context_bytes=context_bytes(device) if is_cuda else None,
                times_s=tuple(timed_s),
            )
        )
    return found


def emptied(device: torch.device) -> None:
    """Release unreferenced memory, so that it counts in no later figure."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@contextlib.contextmanager
def no_garbage(device: torch.device) -> Iterator[None]:
    """Unreferenced memory is released before, and none of what is in cycles meanwhile: when the
    collector runs depends on what ran before, and so would the bytes that are measured."""
    emptied(device)
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def context_bytes(device: torch.device) -> int:
    """What is taken of the device beside this process's allocator: contexts, kernels, others."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """By the host's clock, until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


def absolute_peak_bytes(
    run: Callable[[], object], device: torch.device, resident: Iterable[torch.Tensor]
) -> int:
    """The most on the device during a run: on CUDA all of this process, on the CPU the resident
    tensors and what the run adds."""
    is_cuda = device.type == "cuda"
    before_bytes = torch.cuda.memory_allocated(device) if is_cuda else bytes_of(resident, device)
    return before_bytes + peak_above_bytes(run, device)


def peak_above_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that a run takes on the device above what is there when it starts."""
    if device.type != "cuda":
        return cpu_peak_bytes(run).peak_bytes
    peaks = CudaPeaks(device)
    peaks.begin("all")
    run()
    return peaks.ended()["all"]


@contextlib.contextmanager
def buffers_and_random_state_restored(model: nn.Module) -> Iterator[None]:
    """Restored afterwards, whatever happens; copies are kept on the host meanwhile."""
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in model.buffers()]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def resident_tensors(
    model: nn.Module, batch: Any, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """What a step keeps and that is there already; some of them may share storage."""
    yield from model.parameters()
    yield from model.buffers()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from nested.tensors(batch)
    for each in optimizers:
        on_host = {block.untyped_storage()._cdata for block in host_blocks(each)}
        for tensor in nested.tensors(list(each.state.values())):
            if tensor.untyped_storage()._cdata not in on_host:
                yield tensor


def bytes_of(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on this device (of several, with its index), each once; none
    of sparse tensors, with which nothing is planned.
    """
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in map(local_part, tensors)
        if t.device == device and t.layout == torch.strided
    }
    return sum(storages.values())
