"""Peak memory of a piece of code on the CPU, from the profiler's memory events.

Every allocation of torch's CPU allocator, and every free of memory that was allocated under the
profiler, is an event with its size. Their running sum, in recording order, is the memory taken
since the start; it agrees with a malloc hook within 0.1 MB. Allocations that a library makes past
torch's allocator are not seen, nor those of other threads (a backward pass on the CPU runs in the
caller's thread). Frees of memory allocated before the profiler started are seen only by chance
(torch does not know their size, except for addresses in use under an earlier profiler), so the
measured code should not free what it did not allocate.

A thread has one profiler at most. If the caller's thread has one already (the user profiles some
steps of a training, one of which needs a new plan), the code runs in another thread meanwhile.

This uses torch's first profiler, which still exists beneath `torch.profiler`: it gives the same
sums, keeps the order itself instead of time stamps, starts in microseconds instead of seconds, and
prints nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import (
    ProfilerEvent,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import record_function

_START = "__start_profile"
"""The name of the event that the profiler itself records when it starts."""
_PART_PREFIX = "part of a measured run: "
_ALLOCATION: Any = "memory_alloc"
"""The kind of the events that have a size (torch's stubs type it as an integer)."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes above what was allocated at the start.

    peak_bytes: the maximum.
    end_bytes: what is still allocated at the end.
    """

    peak_bytes: int
    end_bytes: int


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """A context in which garbage is collected by calls of `gc.collect` alone.

    When the collector runs depends on what has run before; what it frees would be missing in the
    measured bytes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def cpu_peak_bytes(run: Callable[[], object]) -> MemoryUse:
    """Run once under the profiler and return the bytes taken. What `run` returns is freed before
    the end.

    Raises what `run` raises.
    """
    taken_bytes = peak_bytes = 0
    for event in _record_events(run):
        if event.kind() == _ALLOCATION:
            taken_bytes += event.cpu_memory_usage()
            peak_bytes = max(peak_bytes, taken_bytes)
    return MemoryUse(peak_bytes=peak_bytes, end_bytes=taken_bytes)


def cpu_peak_bytes_by_part(run: Callable[[], object]) -> dict[str, int]:
    """Like `cpu_peak_bytes`, for each part of the run that `begin_part` starts: the peak bytes
    above the start of that part (the largest peak if several parts have the same name)."""
    peaks: dict[str, int] = {}
    part, taken_bytes = "", 0
    for event in _record_events(run):
        if event.kind() == _ALLOCATION:
            taken_bytes += event.cpu_memory_usage()
            peaks[part] = max(peaks.get(part, 0), taken_bytes)
        elif event.name() != _PART_PREFIX + part:
            part, taken_bytes = event.name().removeprefix(_PART_PREFIX), 0
            peaks.setdefault(part, 0)
    return peaks


def begin_part(name: str) -> None:
    """Start the part called `name`, which lasts until the next call."""
    with record_function(_PART_PREFIX + name):
        pass


def _record_events(run: Callable[[], object]) -> list[ProfilerEvent]:
    """Memory events and part marks of a run, in the order of time over all threads."""
    if _profiler_enabled():
        return _record_events_in_another_thread(run)
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
    events = [event for of_thread in threads for event in of_thread]
    start = next(event for event in events if event.name() == _START)
    wanted = [e for e in events if e.kind() == _ALLOCATION or e.name().startswith(_PART_PREFIX)]
    # a thread's own events are in order already; a stable sort keeps it where times are equal
    return sorted(wanted, key=lambda event: start.cpu_elapsed_us(event))


def _record_events_in_another_thread(run: Callable[[], object]) -> list[ProfilerEvent]:
    """`_record_events` in a thread without a profiler, under the caller's grad mode, autocast and
    context variables."""
    is_grad_enabled, context = torch.is_grad_enabled(), contextvars.copy_context()
    autocast: dict[str, Any] = {
        "enabled": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }

    def record() -> list[ProfilerEvent]:
        with torch.set_grad_enabled(is_grad_enabled), torch.autocast("cpu", **autocast):
            return _record_events(run)

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(context.run, record).result()
