"""One forward and backward pass that leaves no trace, to see what it takes at its worst.

Gradients are asked for by `torch.autograd.grad`: nothing is added to `.grad`, and no hook of an
accumulation fires. Buffers, the random state and the modules' attributes are as before afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.calls import TraceError, device_of, find_loss, nested
from graphs.capture import attributes_unchanged
from graphs.costs import cpu_peak_bytes
from scheduler_runtime.measuring import bytes_of, resident_tensors


@dataclass(frozen=True)
class Rehearsal:
    """A call of a model, to be differentiated.

    loss: of what the model returns (None: the loss in it; where there is none, the sum of its
    floating-point outputs). outside_bytes: of what the step holds and the rehearsal does not
    (optimizer state that is not there yet).
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    outside_bytes: int

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def run(self, forward: Callable[..., Any]) -> None:
        """Forward by `forward`, then all gradients at once; nothing is kept."""
        output = forward(*self.args, **self.kwargs)
        value = self._value(output)
        leaves = [p for p in self.model.parameters() if p.requires_grad]
        with torch.autocast(self.device.type, enabled=False):
            torch.autograd.grad(value, leaves, allow_unused=True)

    def _value(self, output: Any) -> torch.Tensor:
        if self.loss is not None:
            return self.loss(output)
        try:
            return find_loss(output)
        except TraceError:
            parts = [item.sum() for item in nested.tensors(output) if item.requires_grad]
            if not parts:
                raise
            return torch.stack([part.float() for part in parts]).sum()

    def peak_bytes(self, forward: Callable[..., Any]) -> int:
        """The most on the device during a step, what stands around it included.

        The step is run twice: the first compiles, tunes and fills caches.
        """
        with self._untouched():
            self.run(forward)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
                self.run(forward)
                peak_bytes = torch.cuda.max_memory_allocated(self.device)
            else:
                optimizers = () if self.optimizer is None else (self.optimizer,)
                there = resident_tensors(self.model, (self.args, self.kwargs), optimizers)
                used = cpu_peak_bytes(lambda: self.run(forward))
                peak_bytes = bytes_of(there, self.device) + used.peak_bytes
        return peak_bytes + self.outside_bytes

    def time_s(self, forward: Callable[..., Any], *, n_runs: int = 3) -> float:
        """Median seconds of a forward and backward pass."""
        times_s = []
        with self._untouched():
            for _ in range(n_runs):
                self._wait()
                started_s = time.perf_counter()
                self.run(forward)
                self._wait()
                times_s.append(time.perf_counter() - started_s)
        return statistics.median(times_s)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Buffers and random state as before, whatever happens; kept on the host meanwhile.

        Raises SideEffectError where a forward pass changes plain attributes of a module.
        """
        buffers = [(b, b.detach().to("cpu", copy=True)) for b in self.model.buffers()]
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with attributes_unchanged(self.model), torch.random.fork_rng(devices=devices):
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
