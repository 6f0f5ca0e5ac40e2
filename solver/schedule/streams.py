"""Copies that overlap with the computation: what is on host and disk, and when each stream runs.

Five streams run concurrently: compute, and one for each direction of each link (store, fetch,
spill, load). Each runs its ops in the order of the schedule. The step ends when all have ended.

- A compute waits for its stream, and for the fetches of the storages that it reads.
- A copy waits for its stream, for the compute stream to reach the copy's position in the schedule,
  and for its source to be complete.
- An optimizer step that copies its state waits for all copies.
- When a storage is given up, whoever may reuse its bytes waits until the copies from and to it have
  ended. `Free` makes the compute stream wait, and so does a compute that replaces a live output,
  after it has run; `Drop` makes later copies to the host wait, `Delete` later copies to the disk.

On CUDA these are streams and events. The rules are deterministic, and how many bytes are where does
not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from solver.schedule.host_and_disk import Places
from solver.schedule.ops import Copy, Delete, Drop, Fetch, Spill, Store

Stream = Literal["compute", "store", "fetch", "spill", "load"]


@dataclass(frozen=True, slots=True)
class Event:
    """The op at `position` of the schedule runs on `stream` from start_s to end_s."""

    position: int
    stream: Stream
    start_s: float
    end_s: float


class CopyError(ValueError):
    """A storage cannot be copied or given up now. The message continues a sentence that ends with
    the storage's name."""


@dataclass
class Memory:
    """The storages in one memory; for the device only those that were copied from or to.

    ready_s: storage -> when the copy to here is complete. A storage that was computed on the device
        has no entry: it is ready when the compute stream has reached this position.
    busy_s: storage -> when the last copy from or to it ends.
    reusable_s: when all bytes that were given up here may be overwritten.
    bytes, peak_bytes: bytes of the copies here now, and the most so far; not used for the device.
    """

    name: str
    ready_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    reusable_s: float = 0.0
    bytes: int = 0
    peak_bytes: int = 0

    def add(self, storage: str, size_bytes: int, ready_s: float) -> None:
        """Add a copy that is complete at `ready_s`."""
        self.ready_s[storage] = self.busy_s[storage] = ready_s
        self.bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, storage: str, size_bytes: int) -> None:
        """Give up a copy; its bytes can be reused once the copies from and to it have ended."""
        self.ready_s.pop(storage, None)
        self.reusable_s = max(self.reusable_s, self.busy_s.pop(storage, 0.0))
        self.bytes -= size_bytes


class Streams:
    """The clocks of the five streams, and the copies on host and disk.

    places: the host and disk that can be copied to.
    events: filled with the times of every compute and copy (None: not asked for).
    """

    def __init__(self, places: Places | None, events: list[Event] | None) -> None:
        self.host, self.disk = Memory("host"), Memory("disk")
        self._device = Memory("device")
        self._places = places or Places()
        self._events = events
        self._clock_s: dict[Stream, float] = dict.fromkeys(
            ("compute", "store", "fetch", "spill", "load"), 0.0
        )
        self._busy_s: dict[Stream, list[float]] = {}
        self._stalls_s: list[float] = []

    def places_with_copy(self, storage: str) -> str:
        """Where the storage has copies: "host", "disk", "host and the disk", or ""."""
        return " and the ".join(m.name for m in (self.host, self.disk) if storage in m.ready_s)

    def compute(self, position: int, time_s: float, reads: Iterable[str]) -> None:
        """Run a node. reads: the storages that it reads, whose fetches it waits for."""
        ready_s = self._device.ready_s
        if ready_s:
            self._stall_until(max((ready_s.get(storage, 0.0) for storage in reads), default=0.0))
        self._run("compute", position, self._clock_s["compute"], time_s)

    def wait_for_all(self) -> None:
        """Make the next compute wait for all copies started so far."""
        self._stall_until(max(self._clock_s.values()))

    def wait_until_reusable(self, storage: str) -> None:
        """Make the compute stream wait until the storage's bytes on the device can be reused."""
        if storage in self._device.busy_s:
            self._stall_until(self._device.busy_s[storage])
            self._device.remove(storage, 0)

    def _stall_until(self, ready_s: float) -> None:
        if ready_s > self._clock_s["compute"]:
            self._stalls_s.append(ready_s - self._clock_s["compute"])
            self._clock_s["compute"] = ready_s

    def copy(self, position: int, op: Copy, size_bytes: int, *, on_device: bool) -> None:
        """Start a copy. on_device: whether the storage is on the device.

        Raises CopyError if the source does not have the storage, or the target already has it.
        """
        stream, source, target, time_s = self._route(op, size_bytes)
        for memory, is_source in ((source, True), (target, False)):
            has_storage = on_device if memory is self._device else op.storage in memory.ready_s
            if has_storage and not is_source:
                raise CopyError(f"which is on the {memory.name} already")
            if is_source and not has_storage:
                raise CopyError(f"which is not on the {memory.name}")
        # The copy waits for its stream, the compute stream, its source, and its target's bytes.
        start_s = max(
            self._clock_s[stream],
            self._clock_s["compute"],
            source.ready_s.get(op.storage, 0.0),
            target.reusable_s,
        )
        end_s = self._run(stream, position, start_s, time_s)
        self._busy_s.setdefault(stream, []).append(time_s)
        source.busy_s[op.storage] = max(end_s, source.busy_s.get(op.storage, 0.0))
        target.add(op.storage, size_bytes, end_s)

    def drop_copy(self, op: Drop | Delete, size_bytes: int) -> None:
        """Give up the copy on the host or the disk. Raises CopyError if there is none."""
        memory = self.host if isinstance(op, Drop) else self.disk
        if op.storage not in memory.ready_s:
            raise CopyError(f"which is not on the {memory.name}")
        memory.remove(op.storage, size_bytes)

    def _route(self, op: Copy, size_bytes: int) -> tuple[Stream, Memory, Memory, float]:
        """The stream, source, target and duration in seconds of a copy."""
        host, disk = self._places.host, self._places.disk
        if host is None:
            raise CopyError("but no host is given to copy to; give simulate() its `places`")
        if isinstance(op, Store):
            return "store", self._device, self.host, host.link.out_s(size_bytes)
        if isinstance(op, Fetch):
            return "fetch", self.host, self._device, host.link.in_s(size_bytes)
        if disk is None:
            raise CopyError("but no disk is given to copy to; give simulate() its `places`")
        if isinstance(op, Spill):
            return "spill", self.host, self.disk, disk.link.out_s(size_bytes)
        return "load", self.disk, self.host, disk.link.in_s(size_bytes)

    def _run(self, stream: Stream, position: int, start_s: float, time_s: float) -> float:
        end_s = self._clock_s[stream] = start_s + time_s
        if self._events is not None:
            self._events.append(Event(position, stream, start_s, end_s))
        return end_s

    def busy_s(self) -> dict[str, float]:
        """Stream -> total seconds of its copies; streams without copies are left out."""
        return {stream: math.fsum(times_s) for stream, times_s in self._busy_s.items()}

    def end_s(self, compute_s: float) -> float:
        """When the last stream ends. compute_s: the total seconds of all computes.

        Without stalls, the compute stream ends at exactly `compute_s`, bit by bit.
        """
        copies_end_s = (clock_s for stream, clock_s in self._clock_s.items() if stream != "compute")
        return max(math.fsum((compute_s, *self._stalls_s)), *copies_end_s)
