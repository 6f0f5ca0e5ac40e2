"""Measures an island on real tensors: the bytes that it saves for backward, its peaks, its time."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphs.capture.opaque.forms import RandomSources
from graphs.capture.opaque.island import CallResult, Island
from graphs.costs import (
    CudaPeaks,
    begin_part,
    cpu_peak_bytes,
    cpu_peak_bytes_by_part,
    without_collector,
)
from graphs.model_calls import strided_like

MARGIN = 1.125
"""Factor on the bytes of a call whose sizes depend on values, since another batch may need more."""
N_TIMED = 3
"""Number of timed runs; the median counts."""
_NEWEST = 0
_RECENT = 1 if sys.version_info < (3, 14) else 2
"""Arguments of `gc.collect`. A full collection takes long where many modules are imported, and
inside `without_collector` these do: objects since the last collection, and since the one before.
(From Python 3.14 on, `gc.collect(1)` looks at only a part of the older objects.)"""


@dataclass(frozen=True)
class Bytes:
    """The bytes that a call takes.

    saved_bytes: what it keeps for backward.
    forward_bytes, backward_bytes: the peak of each pass beside inputs, results and saved tensors.
    leaked_bytes: what stays allocated after the saved tensors have been freed.
    """

    saved_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    leaked_bytes: int = 0

    def at_least(self, other: Bytes) -> Bytes:
        """The larger of both, field by field."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Bytes(*(max(pair) for pair in pairs))


@dataclass
class Bench:
    """Runs an island several times from the same random state.

    tensors: all tensors of the island: inputs, parameters, buffers.
    random: the generators that it may draw from.
    states: states of the generators at the start of each run (None: the present ones).
    """

    island: Island
    tensors: list[torch.Tensor]
    random: RandomSources
    states: tuple[Any, ...] | None = None

    def forward(self, tensors: Sequence[torch.Tensor] | None = None) -> CallResult:
        """Run the forward pass on these tensors (None: the bench's own).

        The generators have their former states afterwards.
        """
        with self.random.states_restored():
            if self.states is not None:
                self.random.set_states(self.states)
            return self.island.forward(self.tensors if tensors is None else tensors)

    def backward(self, result: CallResult) -> list[torch.Tensor | None]:
        """Run the backward pass of a forward pass, from some gradients of the outputs."""
        reads = self.island.reads
        everything = enumerate([*self.tensors, *result.outs])
        known_tensors = [t if reads is None or i in reads else None for i, t in everything]
        starts: list[None] = [None] * sum(self.island.needs)
        return self.island.backward(
            result.saved, known_tensors, self.ones_as_gradients(result.outs), starts
        )

    def ones_as_gradients(self, outs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Ones as gradients of the outputs that may get one, with the strides known of the step."""
        strides = self.island.request.tangent_strides
        return [
            (strided_like(t, strides=strides[i]) if i in strides else t.new_empty(t.shape)).fill_(1)
            if t.is_floating_point() or t.is_complex()
            else None
            for i, t in enumerate(outs)
        ]

    def with_shuffled_inputs(self) -> Bench:
        """A bench that stands for another batch.

        It has other random numbers, and the values of each floating-point input are shuffled.
        """
        tensors = list(self.tensors)
        with self.random.states_restored():
            if self.states is not None:
                self.random.set_states(self.states)
            self.island.forward(self.tensors)
            for i, tensor in enumerate(tensors[: self.island.n_inputs]):
                if tensor.is_floating_point():
                    order = torch.randperm(tensor.numel(), device=tensor.device)
                    tensors[i] = tensor.reshape(-1)[order].reshape(tensor.shape)
            return dataclasses.replace(self, tensors=tensors, states=self.random.states())

    def bytes_taken(self) -> Bytes:
        """Measure the bytes of one run of both passes."""
        with without_collector():
            return self._bytes_taken()

    def _bytes_taken(self) -> Bytes:
        saved_bytes, leaked_bytes = self._saved_and_leaked_bytes()
        result_bytes: dict[str, int] = {}

        def step() -> None:
            begin("forward")
            result = self.forward()
            result_bytes["forward"] = saved_bytes + _storage_bytes([*result.outs, *result.buffers])
            begin("backward")
            result_bytes["backward"] = _storage_bytes(self.backward(result))

        gc.collect(_RECENT)
        if self.island.device.type == "cpu":
            begin: Callable[[str], None] = begin_part
            peaks = cpu_peak_bytes_by_part(step)
        else:
            meter = CudaPeaks(self.island.device)
            begin = meter.begin
            step()
            peaks = meter.end()
        return Bytes(
            saved_bytes,
            max(0, peaks["forward"] - result_bytes["forward"]),
            max(0, peaks["backward"] - result_bytes["backward"]),
            leaked_bytes,
        )

    def _saved_and_leaked_bytes(self) -> tuple[int, int]:
        """(bytes that the call keeps for backward, bytes that stay once these are freed)."""
        kept: list[Any] = []
        output_storages: list[Any] = []
        n_inputs = self.island.n_inputs

        def run(*, frees_saved: bool) -> None:
            # Copies, so that an input is counted too if an autograd function holds on to it.
            inputs = [t.clone() for t in self.tensors[:n_inputs]]
            result = self.forward([*inputs, *self.tensors[n_inputs:]])
            output_storages.extend(weakref.ref(t.untyped_storage()) for t in result.outs)
            kept.append(result.saved)
            del result, inputs
            if frees_saved:
                kept.clear()
            gc.collect(_NEWEST)

        saved_bytes = _left_allocated_bytes(lambda: run(frees_saved=False), self.island.device)
        kept.clear()
        leaked_bytes = _left_allocated_bytes(lambda: run(frees_saved=True), self.island.device)
        return saved_bytes, max(leaked_bytes, sum(ref() is not None for ref in output_storages))

    def seconds(self) -> tuple[float, float]:
        """Seconds of the forward and of the backward pass, each the median of `N_TIMED` runs."""
        times: list[tuple[float, float]] = []
        for _ in range(N_TIMED):
            started_s = self._now_s()
            result = self.forward()
            middle_s = self._now_s()
            self.backward(result)
            times.append((middle_s - started_s, self._now_s() - middle_s))
        forward_s, backward_s = map(statistics.median, zip(*times, strict=True))
        return forward_s, backward_s

    def _now_s(self) -> float:
        if self.island.device.type == "cuda":
            torch.cuda.synchronize(self.island.device)
        return time.perf_counter()


def _storage_bytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def _left_allocated_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that a run leaves allocated."""
    gc.collect(_RECENT)
    if device.type == "cpu":
        return max(0, cpu_peak_bytes(run).end_bytes)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    return max(0, torch.cuda.memory_allocated(device) - before_bytes)
