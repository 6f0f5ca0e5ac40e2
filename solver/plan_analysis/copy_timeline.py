"""The copies of a plan over time: when each stream is busy, where each storage is, and the stalls.

Everything is derived from the simulator's timeline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphs.graph import Graph, Node
from solver.schedule import (
    Compute,
    Copy,
    Delete,
    Drop,
    Event,
    Fetch,
    Load,
    Op,
    Solution,
    Spill,
    Store,
    name_in,
    timeline,
)

TITLE_OF_STREAM = {
    "compute": "compute",
    "store": "out",
    "fetch": "in",
    "spill": "host to disk",
    "load": "disk to host",
}
"""Stream -> its title, in the order of the plots."""

ROUNDING = 1e-12
"""As a share of the step: a shorter wait is a rounding error, not a stall."""


@dataclass(frozen=True)
class Stream:
    """What one stream does during the step.

    name: a key of `TITLE_OF_STREAM`.
    n_ops: number of computes or copies.
    size_bytes: bytes copied (0 for compute).
    busy_s: seconds in which it runs something.
    share: busy_s as a share of the step.
    """

    name: str
    n_ops: int
    size_bytes: int
    busy_s: float
    share: float

    @property
    def title(self) -> str:
        return TITLE_OF_STREAM[self.name]


@dataclass(frozen=True)
class Stall:
    """The compute stream waits for a copy.

    start_s, end_s: when it waits.
    node: the node that runs next (None: the step waits for its last copies).
    storage: the storage whose copy it waits for ("": unknown).
    """

    start_s: float
    end_s: float
    node: Node | None
    storage: str

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trip:
    """One stay of a storage on the host, with the copies to and from it.

    maker: the op that produces the storage.
    out_s: start and end of the copy from the device to the host (None: it came from the disk).
    back_s: start and end of the last copy back to the device (None: there is none in this stay).
    from_s, until_s: when the host holds bytes for it.
    reader: the first op that reads it after the copy back (None: there is none).
    to_disk_s, from_disk_s: start and end of the copy to the disk and from it (None: no such copy).
    """

    storage: str
    size_bytes: int
    maker: Node
    out_s: tuple[float, float] | None
    back_s: tuple[float, float] | None
    from_s: float
    until_s: float
    reader: Node | None
    to_disk_s: tuple[float, float] | None = None
    from_disk_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class Copies:
    """The timeline of a plan with copies.

    ops: the ops of the schedule.
    events: when each compute and copy runs, in the order of the schedule.
    end_s: when the step ends.
    """

    graph: Graph
    ops: tuple[Op, ...]
    events: tuple[Event, ...]
    end_s: float

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that run anything, in the order of TITLE_OF_STREAM."""
        found = []
        for name in TITLE_OF_STREAM:
            if events := [event for event in self.events if event.stream == name]:
                busy_s = math.fsum(event.end_s - event.start_s for event in events)
                copied = (op for e in events if isinstance(op := self.ops[e.position], Copy))
                size_bytes = sum(map(self._size_bytes, copied))
                share = busy_s / (self.end_s or 1.0)
                found.append(Stream(name, len(events), size_bytes, busy_s, share))
        return tuple(found)

    @cached_property
    def stalls(self) -> tuple[Stall, ...]:
        """All waits of the compute stream, in order of time."""
        # a stall ends when the copy that it waited for ends: end of a copy -> its storage
        copied_by = {
            event.end_s: name_in(self.ops[event.position])
            for event in self.events
            if event.stream != "compute"
        }
        found, at_s = [], 0.0
        least_s = ROUNDING * self.end_s
        for event in self.events:
            if event.stream == "compute":
                if event.start_s > at_s + least_s:
                    storage = copied_by.get(event.start_s, "")
                    node = self.graph.node_by_name[name_in(self.ops[event.position])]
                    found.append(Stall(at_s, event.start_s, node, storage))
                at_s = event.end_s
        if self.end_s > at_s + least_s:
            found.append(Stall(at_s, self.end_s, None, copied_by.get(self.end_s, "")))
        return tuple(found)

    @cached_property
    def trips(self) -> tuple[Trip, ...]:
        """All stays of storages on the host: the largest first, of equal sizes the earliest."""
        # A stay on the host begins with a Store or a Load and ends with a Drop or the step.
        stays: dict[str, list[int]] = {}
        ended: list[tuple[list[int], float]] = []
        for position, op in enumerate(self.ops):
            if isinstance(op, Store | Load):
                stays[op.storage] = [position]
            elif isinstance(op, Fetch | Spill):
                stays[op.storage].append(position)
            elif isinstance(op, Drop):
                ended.append((stays.pop(op.storage), self._clock[position]))
        ended += [(positions, self.end_s) for positions in stays.values()]
        trips = (self._trip(positions, until_s) for positions, until_s in ended)
        return tuple(sorted(trips, key=lambda trip: (-trip.size_bytes, trip.from_s)))

    def _trip(self, positions: Sequence[int], until_s: float) -> Trip:
        """The trip with the copies at these positions. until_s: when its `Drop` takes effect."""
        first, last, event_at = positions[0], positions[-1], self._event_at
        storage = name_in(self.ops[first])
        is_back = isinstance(self.ops[last], Fetch)
        ends_s = [event_at[position].end_s for position in positions]
        spans = {type(self.ops[p]): (event_at[p].start_s, event_at[p].end_s) for p in positions}
        return Trip(
            storage=storage,
            size_bytes=self.graph.tensor_by_name[storage].size_bytes,
            maker=self.graph.producer[storage],
            out_s=spans.get(Store),
            back_s=spans[Fetch] if is_back else None,
            from_s=event_at[first].start_s,
            until_s=max(until_s, *ends_s),
            reader=self._reader(storage, last) if is_back else None,
            to_disk_s=spans.get(Spill),
            from_disk_s=spans.get(Load),
        )

    def _reader(self, storage: str, after: int) -> Node | None:
        """The first node after position `after` that reads the storage."""
        for op in self.ops[after + 1 :]:
            if isinstance(op, Compute):
                node = self.graph.node_by_name[op.node]
                if storage in map(self.graph.root, node.inputs):
                    return node
        return None

    @cached_property
    def _event_at(self) -> dict[int, Event]:
        """Position -> event, for the ops that have one."""
        return {event.position: event for event in self.events}

    @cached_property
    def _clock(self) -> list[float]:
        """When the compute stream reaches each position of the schedule."""
        clock, now_s = [], 0.0
        for position in range(len(self.ops)):
            event = self._event_at.get(position)
            if event is not None and event.stream == "compute":
                now_s = event.end_s
            clock.append(now_s)
        return clock

    def host_bytes(self) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes on the host from then on) for each change."""
        stays = [(trip.from_s, trip.until_s, trip.size_bytes) for trip in self.trips]
        if state_bytes := self.graph.host_state_bytes:
            stays.append((0.0, self.end_s, state_bytes))
        return _bytes_over_time(stays)

    def disk_bytes(self) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes on the disk from then on) for each change."""
        arrived_s: dict[str, float] = {}
        busy_s: dict[str, float] = {}
        stays = []
        for position, op in enumerate(self.ops):
            if isinstance(op, Spill | Load):
                event = self._event_at[position]
                busy_s[op.storage] = event.end_s
                arrived_s.setdefault(op.storage, event.start_s)
            elif isinstance(op, Delete):
                until_s = max(self._clock[position], busy_s.pop(op.storage))
                stays.append((arrived_s.pop(op.storage), until_s, self._size_bytes(op)))
        stays += [
            (start_s, self.end_s, self.graph.tensor_by_name[storage].size_bytes)
            for storage, start_s in arrived_s.items()
        ]
        return _bytes_over_time(stays)

    def _size_bytes(self, op: Op) -> int:
        return self.graph.tensor_by_name[name_in(op)].size_bytes


def _bytes_over_time(stays: Iterable[tuple[float, float, int]]) -> tuple[tuple[float, int], ...]:
    """Add up stays, given as (start, end, bytes), to (seconds, bytes from then on)."""
    change: dict[float, int] = defaultdict(int)
    for from_s, until_s, size_bytes in stays:
        change[from_s] += size_bytes
        change[until_s] -= size_bytes
    held, found = 0, []
    for at_s in sorted(change):
        held += change[at_s]
        found.append((at_s, held))
    return tuple(found)


def copies(solution: Solution) -> Copies | None:
    """The timeline of the plan's copies (None: there is no plan, or it copies nothing)."""
    schedule, simulation = solution.schedule, solution.simulation
    if schedule is None or simulation is None or not schedule.has_copies:
        return None
    events = timeline(solution.graph, schedule, places=solution.request.places)
    return Copies(solution.graph, schedule.ops, events, simulation.time_s)


def trips_of(solution: Solution, outputs: Iterable[str]) -> tuple[Trip, ...]:
    """The stays on the host of the storages of these tensors, in order of time."""
    found = copies(solution)
    roots = set(map(solution.graph.root, outputs))
    trips = [trip for trip in found.trips if trip.storage in roots] if found else []
    return tuple(sorted(trips, key=lambda trip: trip.from_s))
