"""Run real training steps, and measure their peak memory and time.

On the CPU, the profiler's memory events are added up (the result agrees with a malloc hook within
0.1 MB); on CUDA, the peak is the allocator's. The sizes of storages that exist before the step
(parameters, buffers, optimizer state, accumulated gradients, batch) are added.
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

from graphs.capture import generators_of, states_restored
from graphs.costs import CudaPeaks, cpu_peak_bytes, without_collector
from graphs.model_calls import (
    TraceError,
    as_call,
    check_call,
    device_of,
    find_loss,
    local_part,
    nested,
)
from graphs.training_step import GivenOptimizer, read_optimizer, state_tensors
from scheduler_runtime.execute import ReplacedForward, no_watching_modes
from scheduler_runtime.host_memory import host_blocks
from solver.sizes_deadlines_progress import names_checked


@dataclass(frozen=True)
class Measurement:
    """The memory and time that a training step took.

    peak_bytes: the most bytes on the device during the step, resident ones included.
    time_s: median of `times_s`.
    reserved_bytes: what CUDA's allocator took from the device (None on the CPU).
    context_bytes: what else was in use on the device: contexts, kernels and other processes (None
        on the CPU).
    times_s: the steps that were timed without a profiler.
    """

    peak_bytes: int
    time_s: float
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    times_s: tuple[float, ...] = ()


@dataclass(eq=False)
class TrainingStep:
    """A training step as in a usual training loop, to be run several times.

    batch, loss, inputs: as in `graphs.trace.trace`.
    optimizer: makes a step in `run` (None: forward and backward pass only).
    autocast: dtype of the forward pass and the loss (None: no autocast).

    Raises TraceError for a batch that the model does not accept.
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
        """Run the forward pass; returns the loss. The model's output is held until `release`, as in
        a training loop that assigns it to a variable."""
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
        """Run one step; returns its loss. Gradients accumulate."""
        loss = self.forward()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.release()
        return loss

    def release(self) -> None:
        """Drop the model's output."""
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
    """Run training steps and measure them. With an optimizer, the model's parameters change.

    loss, inputs, optimizer: as in `graphs.trace.trace`.
    autocast: as in `TrainingStep`.
    gradients: "fresh" (set to None before each step) or "accumulate".
    n_steps: number of timed steps. One step before them warms up (the optimizer creates its state
        then), and memory is measured in one step after them.

    Raises TraceError for a batch that the model does not accept.
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


@no_watching_modes()  # a watch of another model's loss must not see these steps
def measure_in_turns(
    model: nn.Module,
    batch: Any,
    contexts: Sequence[Callable[[], contextlib.AbstractContextManager[Any]]],
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    inputs: Callable[[Any], Any] | None = None,
    optimizer: GivenOptimizer | None = None,
    autocast: torch.dtype | None = None,
    gradients: str = "fresh",
    n_steps: int = 3,
) -> list[Measurement]:
    """Measure the same step in several contexts, whose timed steps take turns.

    The load and the clock rate of the machine change with time; so they affect all contexts alike.

    contexts: functions that make the contexts. The other parameters are those of `measure`.

    Returns a measurement for each context.
    """
    if gradients not in ("fresh", "accumulate"):
        raise ValueError(f"gradients is {gradients!r}; 'fresh' or 'accumulate'")
    own_optimizer = None if optimizer is None else read_optimizer(optimizer, model)
    step = TrainingStep(
        model, batch, loss=loss, inputs=inputs, optimizer=own_optimizer, autocast=autocast
    )
    device = step.device
    is_cuda = device.type == "cuda"
    times_s: list[list[float]] = [[] for _ in contexts]
    for _ in range(1 + n_steps):
        for context, context_times_s in zip(contexts, times_s, strict=True):
            if gradients == "fresh":
                step.clear_gradients()
            with context():
                context_times_s.append(seconds_of(step.run, device))
    optimizers = () if own_optimizer is None else (own_optimizer,)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    planned = [forward for forward in forwards if isinstance(forward, ReplacedForward)]
    constants = [tensor for forward in planned for tensor in forward.constants()]
    found = []
    for context, (_, *timed_s) in zip(contexts, times_s, strict=True):
        if gradients == "fresh":
            step.clear_gradients()
        free_unreferenced(device)  # otherwise memory of an earlier run would count as reserved here
        with context():
            peak_bytes = _peak_bytes_of(
                step, lambda: [*resident_tensors(model, batch, optimizers), *constants]
            )
        found.append(
            Measurement(
                peak_bytes=peak_bytes,
                time_s=statistics.median(timed_s),
                reserved_bytes=torch.cuda.max_memory_reserved(device) if is_cuda else None,
                context_bytes=context_bytes(device) if is_cuda else None,
                times_s=tuple(timed_s),
            )
        )
    return found


def _peak_bytes_of(step: TrainingStep, resident: Callable[[], Iterable[torch.Tensor]]) -> int:
    """The most bytes on the device during a step.

    On the CPU, a step that puts new tensors in the place of resident ones (a momentum encoder that
    sets `.data`) runs twice: the profiler does not see that memory is freed which was allocated
    before it started, unless under an earlier profiler.

    resident: gives the tensors that exist before the step.
    """
    device = step.device
    if device.type == "cuda":
        return absolute_peak_bytes(step.run, device, ())
    before = _storages(resident())  # held, so that no other storage gets the address of one
    gradients = {p: p.grad for p in step.model.parameters()}
    peak_bytes = bytes_of(resident(), device) + peak_above_bytes(step.run, device)
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    if _storages(resident()).keys() == before.keys():
        return peak_bytes
    del before
    return bytes_of(resident(), device) + peak_above_bytes(step.run, device)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors that are not sparse, by their addresses."""
    found = (t.untyped_storage() for t in map(local_part, tensors) if t.layout == torch.strided)
    return {storage._cdata: storage for storage in found}


def free_unreferenced(device: torch.device) -> None:
    """Release unreferenced memory, so that it does not count in a later measurement."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@contextlib.contextmanager
def no_garbage(device: torch.device) -> Iterator[None]:
    """A context without garbage collection; unreferenced memory is released before it."""
    free_unreferenced(device)
    with without_collector():
        yield


def context_bytes(device: torch.device) -> int:
    """Bytes in use on the device outside of this process's allocator: contexts, kernels, other
    processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """How long a run takes by the host's clock, until the device is done."""
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
    """The most bytes on the device during a run: on CUDA all that this process has allocated, on
    the CPU the resident tensors and what the run adds."""
    is_cuda = device.type == "cuda"
    before_bytes = torch.cuda.memory_allocated(device) if is_cuda else bytes_of(resident, device)
    return before_bytes + peak_above_bytes(run, device)


def peak_above_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a run adds on the device to those in use when it starts."""
    if device.type != "cuda":
        return cpu_peak_bytes(run).peak_bytes
    peaks = CudaPeaks(device)
    peaks.begin("all")
    run()
    return peaks.end()["all"]


@contextlib.contextmanager
def buffers_and_random_state_restored(model: nn.Module) -> Iterator[None]:
    """After this context, buffers and random state are as before, also after an error: that of
    torch, Python and NumPy, and of generators that the model holds. Copies of the buffers are kept
    on the host."""
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in model.buffers()]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), states_restored(generators_of(model).values()):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def resident_tensors(
    model: nn.Module, batch: Any, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """The tensors that exist before a step and stay during it: parameters, buffers, gradients,
    batch, and optimizer state that is not on the host. Some may share storage."""
    yield from model.parameters()
    yield from model.buffers()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from nested.tensors(batch)
    for each in optimizers:
        on_host = {block.untyped_storage()._cdata for block in host_blocks(each)}
        for tensor in state_tensors(each):
            if tensor.untyped_storage()._cdata not in on_host:
                yield tensor


def bytes_of(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on this device, each counted once.

    Sparse tensors do not count, since steps with them are not planned.
    """
    on_device = (tensor for tensor in tensors if tensor.device == device)
    return sum(storage.nbytes() for storage in _storages(on_device).values())
