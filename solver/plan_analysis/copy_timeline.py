"""The copies of a plan over time: when each stream is busy, where each storage is, what waits.

Everything is read off the simulator's timeline.
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
"""In the order of the pictures."""

ROUNDING = 1e-12
"""Of the step: a shorter wait is an error of adding up seconds."""


@dataclass(frozen=True)
class Stream:
    """name: of `TITLE_OF_STREAM`. n_ops: computes or copies. size_bytes: copied (0 for compute).
    busy_s: the seconds in which it runs something. share: of the step."""

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
    """The compute stream waits from start_s to end_s, before `node` runs (None: for the step's last
    copies), for the copy of `storage` (empty: the copy is not known)."""

    start_s: float
    end_s: float
    node: Node | None
    storage: str

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Trip:
    """One storage on the host.

    maker: the op that produces it.
    out_s, back_s: start and end of the copy there and of the last one back (None: it comes from the
        disk, or is not brought back from here).
    to_disk_s, from_disk_s: of its copies to the disk and from there (None: there is none).
    from_s, until_s: when the host holds bytes for it.
    reader: the first op after the last copy back that reads it.
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

    end_s: of the step.
    events: in the order of the schedule.
    ops: of the schedule.
    """

    graph: Graph
    ops: tuple[Op, ...]
    events: tuple[Event, ...]
    end_s: float

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """Those that run anything."""
        found = []
        for name in TITLE_OF_STREAM:
            if events := [event for event in self.events if event.stream == name]:
                busy_s = math.fsum(event.end_s - event.start_s for event in events)
                copied = (op for e in events if isinstance(op := self.ops[e.position], Copy))
                size_bytes, share = sum(map(self._size_bytes, copied)), busy_s / (self.end_s or 1.0)
                found.append(Stream(name, len(events), size_bytes, busy_s, share))
        return tuple(found)

    @cached_property
    def stalls(self) -> tuple[Stall, ...]:
        """In their order."""
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
        """The largest first; of equals the earlier."""
        at = {event.position: event for event in self.events}
        clock = self._clock(at)
        stays: dict[str, list[int]] = {}
        ended: list[tuple[list[int], float]] = []
        for position, op in enumerate(self.ops):
            if isinstance(op, Store | Load):
                stays[op.storage] = [position]
            elif isinstance(op, Fetch | Spill):
                stays[op.storage].append(position)
            elif isinstance(op, Drop):
                ended.append((stays.pop(op.storage), clock[position]))
        ended += [(positions, self.end_s) for positions in stays.values()]
        trips = (self._trip(positions, until_s, at) for positions, until_s in ended)
        return tuple(sorted(trips, key=lambda trip: (-trip.size_bytes, trip.from_s)))

    def _trip(self, positions: Sequence[int], until_s: float, at: dict[int, Event]) -> Trip:
        first, last = positions[0], positions[-1]
        storage = name_in(self.ops[first])
        is_out, is_back = isinstance(self.ops[first], Store), isinstance(self.ops[last], Fetch)
        ends_s = [at[position].end_s for position in positions]
        spans = {type(self.ops[p]): (at[p].start_s, at[p].end_s) for p in positions}
        return Trip(
            storage=storage,
            size_bytes=self.graph.tensor_by_name[storage].size_bytes,
            maker=self.graph.producer[storage],
            out_s=(at[first].start_s, at[first].end_s) if is_out else None,
            back_s=(at[last].start_s, at[last].end_s) if is_back else None,
            from_s=at[first].start_s,
            until_s=max(until_s, *ends_s),
            reader=self._reader(storage, last) if is_back else None,
            to_disk_s=spans.get(Spill),
            from_disk_s=spans.get(Load),
        )

    def _reader(self, storage: str, after: int) -> Node | None:
        for op in self.ops[after + 1 :]:
            if isinstance(op, Compute):
                node = self.graph.node_by_name[op.node]
                if storage in map(self.graph.root, node.inputs):
                    return node
        return None

    def _clock(self, at: dict[int, Event]) -> list[float]:
        """By position: when the compute stream has come there."""
        clock, now_s = [], 0.0
        for position in range(len(self.ops)):
            event = at.get(position)
            if event is not None and event.stream == "compute":
                now_s = event.end_s
            clock.append(now_s)
        return clock

    def host_bytes(self) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes on the host from then on), where they change."""
        stays = [(trip.from_s, trip.until_s, trip.size_bytes) for trip in self.trips]
        if state_bytes := self.graph.host_state_bytes:
            stays.append((0.0, self.end_s, state_bytes))
        return _held(stays)

    def disk_bytes(self) -> tuple[tuple[float, int], ...]:
        """(seconds, bytes on the disk from then on), where they change."""
        at = {event.position: event for event in self.events}
        clock = self._clock(at)
        came_s: dict[str, float] = {}
        busy_s: dict[str, float] = {}
        stays = []
        for position, op in enumerate(self.ops):
            if isinstance(op, Spill | Load):
                busy_s[op.storage] = at[position].end_s
                came_s.setdefault(op.storage, at[position].start_s)
            elif isinstance(op, Delete):
                until_s = max(clock[position], busy_s.pop(op.storage))
                stays.append((came_s.pop(op.storage), until_s, self._size_bytes(op)))
        stays += [
            (start_s, self.end_s, self.graph.tensor_by_name[storage].size_bytes)
            for storage, start_s in came_s.items()
        ]
        return _held(stays)

    def _size_bytes(self, op: Op) -> int:
        return self.graph.tensor_by_name[name_in(op)].size_bytes


def _held(stays: Iterable[tuple[float, float, int]]) -> tuple[tuple[float, int], ...]:
    """stays: (from, until, bytes)."""
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
    """None: the plan copies nothing, or there is none."""
    schedule, simulation = solution.schedule, solution.simulation
    if schedule is None or simulation is None or not schedule.has_copies:
        return None
    events = timeline(solution.graph, schedule, places=solution.request.places)
    return Copies(solution.graph, schedule.ops, events, simulation.time_s)


def copied(solution: Solution, outputs: Iterable[str]) -> tuple[Trip, ...]:
    """The trips of the storages of these tensors, in the order of time."""
    found = copies(solution)
    roots = set(map(solution.graph.root, outputs))
    trips = [trip for trip in found.trips if trip.storage in roots] if found else []
    return tuple(sorted(trips, key=lambda trip: trip.from_s))
