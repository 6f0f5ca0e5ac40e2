"""Place copies in a schedule: when each storage leaves the device, and when it comes back.

Given are an order of nodes that includes recomputation, and the gaps to be spent on the host or the
disk: spans between two uses of a storage in which nothing reads it. One sweep goes through the
order, with a clock for every stream:

- A storage is stored right after it is made, in the order of making; if the host is full, as soon
  as something has been dropped there.
- It leaves the device when the gap has begun and the store is over. It leaves sooner, so that the
  compute stream waits, only if the budget requires it, the one whose store ends first going first.
- It is fetched by earliest deadline, as soon as the link is free and its bytes fit at every node up
  to its use; at the use at the latest.
- What is on the disk (`copy_placement_state`) is loaded by earliest deadline too: in time for its
  use or, once nothing more is to be stored, as soon as the host has room.

The budget is checked at each node: the compute stream waits for what would leave too late, and if
even that does not help, the position is reported. The simulator decides time and peak.

Cost: linear in the order and the gaps, except for checking the bytes of a fetch up to its use.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from solver.bound import StorageGraph
from solver.methods.auto.copy_placement_state import HostAndDisk, goes_to_disk
from solver.methods.auto.runs import live_bytes
from solver.schedule import (
    Compute,
    Free,
    Op,
    Place,
    Places,
    Schedule,
    copy_layout,
    free_after_last_use,
    simulate,
)

N_FETCH_CANDIDATES = 4
"""Fetches, by deadline, among which one that fits is sought."""
MAX_LAYOUTS = 4
"""Maximum times that copies are placed, each time with less of the host."""
LOAD_LEAD = 2.0
"""How long before its use a storage is loaded, in times from the disk to the device."""


@dataclass(frozen=True, order=True)
class Gap:
    """A span between two uses of a unit in which nothing reads it.

    made, first, last: positions in the order: of the run that made it, the use before the gap (or
        the making) and the use after it.
    """

    made: int
    first: int
    last: int
    unit: int


def never_copied(folded: StorageGraph) -> frozenset[int]:
    """Units that must not be copied.

    They are units that a node overwrites, as the old value must not come back; those that the rules
    keep from being stored; and units that the caller makes and holds, which are the gradients of
    outputs, from a loss outside.
    """
    graph = folded.graph
    stay = {graph.root(node.overwrites) for node in graph.nodes if node.overwrites is not None}
    of_module = ("forward", "backward")
    made = {name for name, node in graph.producer.items() if node.phase in of_module}
    stay |= {graph.root(name) for name in graph.producer} - made
    names = enumerate(folded.unit_names)
    return frozenset(u for u, name in names if name in stay or not folded.may_be_stored(u))


def find_gaps(folded: StorageGraph, order: Sequence[str]) -> list[Gap]:
    """All gaps with at least one run inside, of units that may be copied."""
    not_copied = never_copied(folded)
    made: dict[int, int] = {}
    used: dict[int, int] = {}
    gaps = []

    def record_use(u: int, i: int) -> None:
        if i > used[u] + 1 and folded.unit_bytes[u] and u not in not_copied:
            gaps.append(Gap(made[u], used[u], i, u))
        used[u] = i

    for i, name in enumerate(order):
        n = folded.position[name]
        for u in folded.reads[n]:
            record_use(u, i)
        for u in folded.makes[n]:
            made[u] = used[u] = i
    return gaps


@dataclass(frozen=True)
class Placed:
    """A schedule with its copies.

    over_bytes: by position in the order, bytes above the budget there.
    waits_s: by unit, seconds that the compute stream waits for its copies.
    time_s: when the last stream ends.
    """

    schedule: Schedule
    over_bytes: Mapping[int, int]
    waits_s: Mapping[int, float]
    time_s: float


def place_copies(
    folded: StorageGraph,
    order: Sequence[str],
    gaps: Iterable[Gap],
    *,
    budget_bytes: int,
    places: Places,
    to_disk: frozenset[int] = frozenset(),
) -> Placed:
    """The schedule that spends these gaps on the host, or the disk for the units in to_disk."""
    sweep = _Sweep(folded, order, gaps, budget_bytes=budget_bytes, places=places, to_disk=to_disk)
    return sweep.run()


def place_within_layout(
    folded: StorageGraph,
    order: Sequence[str],
    gaps: Sequence[Gap],
    *,
    budget_bytes: int,
    places: Places,
    to_disk: Callable[[Places], frozenset[int]],
) -> Placed:
    """Place copies, with less capacity each time, until their memory layout fits the places.

    to_disk: for given capacities, the units that go on to the disk.
    """
    reduced = places
    for _ in range(MAX_LAYOUTS):
        placed = place_copies(
            folded,
            order,
            gaps,
            budget_bytes=budget_bytes,
            places=reduced,
            to_disk=to_disk(reduced),
        )
        layout = copy_layout(folded.graph, placed.schedule, places)
        host = _with_less_capacity(reduced.host, layout.host_bytes - places.host_bytes)
        disk = _with_less_capacity(reduced.disk, layout.disk_bytes - places.disk_bytes)
        if host is None or (host, disk) == (reduced.host, reduced.disk):
            break
        reduced = Places(host, disk)
    return placed


def _with_less_capacity(place: Place | None, over_bytes: int) -> Place | None:
    """The place with over_bytes less; None: nothing is left."""
    if place is None or over_bytes <= 0:
        return place
    left_bytes = place.capacity_bytes - over_bytes
    return replace(place, capacity_bytes=left_bytes) if left_bytes > 0 else None


def longest_to_disk(folded: StorageGraph, gaps: Iterable[Gap], places: Places) -> frozenset[int]:
    """Units to move to the disk so that the host has room for the others (`goes_to_disk`)."""
    last: dict[tuple[int, int], int] = {}
    for gap in gaps:
        last[gap.made, gap.unit] = max(gap.last, last.get((gap.made, gap.unit), 0))
    stays = [(made, until, u) for (made, u), until in sorted(last.items())]
    return goes_to_disk(stays, folded.unit_bytes, places)


class _Sweep:
    """live: bytes on the device while each node runs, and at the end, as far as known so far."""

    def __init__(
        self,
        folded: StorageGraph,
        order: Sequence[str],
        gaps: Iterable[Gap],
        *,
        budget_bytes: int,
        places: Places,
        to_disk: frozenset[int],
    ) -> None:
        self.folded, self.order, self.budget_bytes = folded, order, budget_bytes
        graph = folded.graph
        plain = free_after_last_use(graph, order)
        self.frees: list[list[str]] = []
        for op in plain.ops:
            if isinstance(op, Compute):
                self.frees.append([])
            elif isinstance(op, Free):
                self.frees[-1].append(op.tensor)
        end_bytes = graph.resident_bytes + sum(
            folded.unit_bytes[u] for u in range(folded.n_units) if folded.is_output(u)
        )
        self.live = np.append(live_bytes(plain, simulate(graph, plain)), end_bytes)
        self.time_s = [graph.node_by_name[name].time_s for name in order]
        self.start_s = list(accumulate(self.time_s, initial=0.0))
        self.gaps_from: dict[int, list[Gap]] = {}
        self.stored_at: dict[int, list[int]] = {}
        self.last_gap: dict[tuple[int, int], int] = {}
        for gap in sorted(gaps):
            self.live[gap.first + 1 : gap.last] -= folded.unit_bytes[gap.unit]
            self.gaps_from.setdefault(gap.first, []).append(gap)
            if (gap.unit, gap.made) not in self.last_gap:
                self.stored_at.setdefault(gap.made, []).append(gap.unit)
            self.last_gap[gap.unit, gap.made] = gap.last
        self.names: dict[int, list[str]] = {}
        for name, u in folded.unit_of.items():
            self.names.setdefault(u, []).append(name)
        self.ops: list[Op] = []
        self.device: set[str] = set()  # tensors that a node made and that are on the device
        self.ran: set[str] = set()
        self.now_s = 0.0
        self.offload = HostAndDisk(
            places,
            names=folded.unit_names,
            unit_bytes=folded.unit_bytes,
            to_disk=to_disk,
            ops=self.ops,
        )
        self.last_store = max(self.stored_at, default=-1)
        self.fetch_end_s: dict[int, float] = {}
        self.wanted: dict[Gap, frozenset[str]] = {}  # tensors of the unit that are used after it
        self.leaving: dict[int, tuple[Gap, int]] = {}  # and up to where `live` counts the unit
        self.offloaded: list[tuple[int, int, Gap]] = []
        self.due_gaps: dict[int, list[Gap]] = {}
        self.fetched: set[Gap] = set()
        self.over_bytes: dict[int, int] = {}
        self.waits_s: dict[int, float] = {}

    def run(self) -> Placed:
        for i, name in enumerate(self.order):
            self._before_run(i)
            self._compute(i, name)
            self._after_run(i)
        self._before_run(len(self.order))
        schedule = Schedule(tuple(self.ops), self.folded.graph.graph_id)
        return Placed(schedule, self.over_bytes, self.waits_s, max(self.now_s, self.offload.end_s))

    def _before_run(self, i: int) -> None:
        """Let units leave, and fetch others, before the run at i."""
        self._store_waiting()
        for gap in self.due_gaps.get(i, ()):
            if self.leaving.get(gap.unit, (None,))[0] == gap:  # it could not leave in time
                del self.leaving[gap.unit]
                self.fetched.add(gap)
        for u, (gap, until) in list(self.leaving.items()):
            if self.offload.stored_s.get(u, math.inf) <= self.now_s:
                self._take_off_device(u, i)
            elif until <= i:
                self.live[i] += self.folded.unit_bytes[u]
                self.leaving[u] = gap, i + 1
        self._make_room(i)
        for gap in self.due_gaps.get(i, ()):
            if gap not in self.fetched:
                self._fetch(gap, i)
        if i < len(self.order):
            self._prefetch(i)

    def _make_room(self, i: int) -> None:
        while self.live[i] > self.budget_bytes:
            stored_s = self.offload.stored_s
            stored = [u for u in self.leaving if u in stored_s]
            if not stored:
                if self.offload.store_one_now(self.leaving, self.now_s):
                    continue
                self.over_bytes[i] = int(self.live[i]) - self.budget_bytes
                return
            u = min(stored, key=lambda u: (stored_s[u], u))
            self._wait(u, stored_s[u])
            self._take_off_device(u, i)

    def _take_off_device(self, u: int, i: int) -> None:
        gap, until = self.leaving.pop(u)
        self.live[i:until] -= self.folded.unit_bytes[u]
        self._wait_for_copies(u)
        for name in self.names[u]:
            if name in self.device:
                self.ops.append(Free(name))
                self.device.discard(name)
        self.offloaded.append((gap.last, u, gap))

    def _prefetch(self, i: int) -> None:
        end_s = self.now_s + self.time_s[i]
        self._load_ahead(i, end_s)
        while self.offloaded and self.offload.fetches_end_s < end_s:
            on_host = (each for each in self.offloaded if self.offload.is_on_host(each[1]))
            for last, _, gap in heapq.nsmallest(N_FETCH_CANDIDATES, on_host):
                room = self.budget_bytes - self.folded.unit_bytes[gap.unit]
                if gap in self.fetched or last <= i or int(self.live[i:last].max()) <= room:
                    break
            else:
                return
            self.offloaded.remove((gap.last, gap.unit, gap))
            if gap not in self.fetched:
                self._fetch(gap, i)

    def _load_ahead(self, i: int, end_s: float) -> None:
        """Load units from the disk to the host, by deadline."""
        all_stored = i > self.last_store and not self.offload.waiting_to_store
        on_disk = (each for each in self.offloaded if not self.offload.is_on_host(each[1]))
        for last, u, gap in sorted(on_disk):
            if gap in self.fetched:
                continue
            left_s = self.start_s[last] - self.start_s[i]
            is_time = all_stored or left_s <= LOAD_LEAD * self.offload.disk_to_device_s(u)
            if not is_time or self.offload.loads_end_s >= end_s:
                return
            if not self.offload.load(u, self.now_s, make_room=False):
                return

    def _fetch(self, gap: Gap, i: int) -> None:
        u = gap.unit
        size_bytes = self.folded.unit_bytes[u]
        self.fetched.add(gap)
        self.live[i : gap.last] += size_bytes
        self.fetch_end_s[u] = self.offload.fetch(u, self.now_s)
        wanted = self.wanted[gap]
        for name in self.names[u]:
            if self.folded.graph.producer[name].name in self.ran:
                if name in wanted:
                    self.device.add(name)
                else:
                    self.ops.append(Free(name))

    def _compute(self, i: int, name: str) -> None:
        node = self.folded.graph.node_by_name[name]
        n = self.folded.position[name]
        for u in self.folded.reads[n]:
            self._wait(u, self.fetch_end_s.get(u, 0.0))
        self.ops.append(Compute(name))
        self.ran.add(name)
        self.now_s += self.time_s[i]
        self.device.update(node.outputs)

    def _after_run(self, i: int) -> None:
        for gap in self.due_gaps.pop(i, ()):
            if self.last_gap[gap.unit, gap.made] == gap.last:
                self.offload.delete_copies(gap.unit)
        for name in self.frees[i]:
            self.ops.append(Free(name))
            self.device.discard(name)
            u = self.folded.unit_of.get(name)
            if u is not None and self.device.isdisjoint(self.names[u]):
                self._wait_for_copies(u)
        self.offload.waiting_to_store.extend(self.stored_at.get(i, ()))
        self._store_waiting()
        for gap in self.gaps_from.get(i, ()):
            self._begin_gap(gap, i)

    def _wait_for_copies(self, u: int) -> None:
        self._wait(u, max(self.fetch_end_s.pop(u, 0.0), self.offload.free_after_s.pop(u, 0.0)))

    def _wait(self, u: int, until_s: float) -> None:
        if until_s > self.now_s:
            self.waits_s[u] = self.waits_s.get(u, 0.0) + until_s - self.now_s
            self.now_s = until_s

    def _begin_gap(self, gap: Gap, i: int) -> None:
        u = gap.unit
        self.wanted[gap] = frozenset(name for name in self.names[u] if name in self.device)
        until = i + 1
        store_end_s = self.offload.stored_s.get(u)
        if store_end_s is not None:
            until = bisect_left(self.start_s, store_end_s - self.now_s + self.start_s[i + 1])
            until = max(i + 1, min(until, gap.last))
        self.live[i + 1 : until] += self.folded.unit_bytes[u]
        self.leaving[u] = gap, until
        self.due_gaps.setdefault(gap.last, []).append(gap)

    def _store_waiting(self) -> None:
        self.offload.store_waiting(self.now_s, lambda u: not self.device.isdisjoint(self.names[u]))
