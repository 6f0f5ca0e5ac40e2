"""Let several cases share one GPU: each has the device to itself while it is timed.

Tracing and planning take most of a case's time and need only a CPU core, so cases run in parallel,
each in its process (`--jobs`). A process that uses the device holds an exclusive lock on a file.
While a model is compiled, which uses the device now and then, the lock is shared: several processes
may compile at once, but nothing is timed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterator
from typing import IO

import torch

from graphs.costs import CostCache, Measured
from graphs.costs.cache import default_cache_file
from graphs.costs.host_copies import measured_host_copies
from graphs.costs.operators import Cost, OpCall
from graphs.hardware import HostCopies

FILE_VARIABLE = "CHECKPOINT_SOLVER_GPU_TURN"
_lock_file: IO[str] | None = None


def has_other_processes() -> bool:
    """Whether other processes may be on the device."""
    return FILE_VARIABLE in os.environ


@contextlib.contextmanager
def exclusive_turn() -> Iterator[None]:
    """Wait until this process has the device to itself. Does not wait if it has it already or if
    there are no other processes."""
    global _lock_file
    if not has_other_processes() or _lock_file is not None:
        yield
        return
    with open(os.environ[FILE_VARIABLE], "w") as _lock_file:
        fcntl.flock(_lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _lock_file = None


@contextlib.contextmanager
def turn_released() -> Iterator[None]:
    """Within a turn: release the device for work that does not need it or takes its own turns."""
    global _lock_file
    lock_file, _lock_file = _lock_file, None
    if lock_file is not None:
        fcntl.flock(lock_file, fcntl.LOCK_UN)
    try:
        yield
    finally:
        if lock_file is not None:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        _lock_file = lock_file


@contextlib.contextmanager
def turn_shared() -> Iterator[None]:
    """Within a turn: use the device while other processes may share it; nothing is timed then."""
    if _lock_file is None:
        yield
        return
    fcntl.flock(_lock_file, fcntl.LOCK_SH)
    try:
        yield
    finally:
        fcntl.flock(_lock_file, fcntl.LOCK_EX)


class MeasuredInTurn(Measured):
    """Measured costs, cached on disk; each measurement takes a turn."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, cache=CostCache(default_cache_file(device), device))

    @functools.cached_property
    def host_copies(self) -> HostCopies:
        with exclusive_turn():
            return measured_host_copies(self.device)

    def _measure(self, call: OpCall) -> Cost:
        with exclusive_turn():
            return super()._measure(call)
