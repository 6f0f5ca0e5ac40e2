"""How many bytes a piece of code takes on the CPU, by the profiler's memory events.

Every allocation of torch's CPU allocator, and every release of what was allocated under the
profiler, is an event with its size. Their running sum, in the order in which they were recorded, is
the memory taken since the start; it agrees with a malloc hook within 0.1 MB. Not seen are memory
that a library takes past torch's allocator, and other threads than the caller's (a backward pass on
the CPU runs in the caller's). The release of what was there before is seen only by chance (torch
knows no size then, but for addresses that were in use under an earlier profiler): what is measured
should not drop what it did not make.

The events are those of torch's first profiler, which is still there beneath `torch.profiler`: it
gives the same sums, keeps the order itself instead of time stamps, starts in microseconds instead
of seconds, and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import (
    ProfilerEvent,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import record_function

_START = "__start_profile"
"""The mark that the profiler itself makes when it starts."""
_PART = "part of a measured run: "
_ALLOCATION: Any = "memory_alloc"
"""The kind of the events that have a size (torch's stubs have them as integers)."""


@dataclass(frozen=True)
class MemoryUse:
    """peak_bytes: the most above the start. end_bytes: what is still taken at the end."""

    peak_bytes: int
    end_bytes: int


def cpu_peak_bytes(run: Callable[[], object]) -> MemoryUse:
    """Run once under the profiler. What `run` returns is dropped inside.

    Raises what `run` raises, and RuntimeError under a profiler that is already at work.
    """
    taken = peak = 0
    for n_bytes in _allocations(_recorded(run)):
        taken += n_bytes
        peak = max(peak, taken)
    return MemoryUse(peak_bytes=peak, end_bytes=taken)


def cpu_peak_bytes_by_part(run: Callable[[], object]) -> dict[str, int]:
    """Like `cpu_peak_bytes`, for each part of the run that `begin_part` opens: the most above that
    part's start (of several parts of one name, the most of all)."""
    threads = _recorded(run)
    start = _start(threads)
    timed = [
        (start.cpu_elapsed_us(event), event)
        for events in threads
        for event in events
        if event.kind() == _ALLOCATION or event.name().startswith(_PART)
    ]
    timed.sort(key=lambda item: item[0])
    peaks: dict[str, int] = {}
    part, taken = "", 0
    for _, event in timed:
        if event.kind() == _ALLOCATION:
            taken += event.cpu_memory_usage()
            peaks[part] = max(peaks.get(part, 0), taken)
        elif event.name() != _PART + part:
            part, taken = event.name().removeprefix(_PART), 0
            peaks.setdefault(part, 0)
    return peaks


def begin_part(name: str) -> None:
    """From here on, until the next call, is the part called `name`."""
    with record_function(_PART + name):
        pass


def _recorded(run: Callable[[], object]) -> list[list[ProfilerEvent]]:
    _enable_profiler_legacy(
        ProfilerConfig(
            ProfilerState.CPU,
            False,  # record_input_shapes
            True,  # profile_memory
            False,  # with_stack
            False,  # with_flops
            False,  # with_modules
            _ExperimentalConfig(),
        )
    )
    try:
        run()
    finally:
        threads = _disable_profiler_legacy()
    return threads


def _start(threads: list[list[ProfilerEvent]]) -> ProfilerEvent:
    return next(event for events in threads for event in events if event.name() == _START)


def _allocations(threads: list[list[ProfilerEvent]]) -> list[int]:
    """Bytes taken (and given back, below zero), in the order of time over all threads.

    A thread's own events are in their order already, and the sort keeps it where times are equal.
    """
    start = _start(threads)
    timed = [
        (start.cpu_elapsed_us(event), event.cpu_memory_usage())
        for events in threads
        for event in events
        if event.kind() == _ALLOCATION
    ]
    timed.sort(key=lambda item: item[0])
    return [n_bytes for _, n_bytes in timed]
