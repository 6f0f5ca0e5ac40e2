"""Host and disk while copies are placed: what is there, and when each copy stream ends.

While a unit is away it either stays on the host or goes on to the disk. In the latter case its copy
on the host is only *passing*: it is given up once the disk has it and its bytes are needed. A part
of the host is reserved for passing copies: twice the bytes of the largest of them, or once if that
is too much. So whatever is on the disk can come back at any time. Ops are appended in the order in
which the copies are issued; the times follow the rules of `solver.schedule.streams`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

from solver.schedule import Delete, Drop, Fetch, Load, Op, Places, Spill, Store


class HostAndDisk:
    """Host and disk memory and the copy streams.

    ops: where the copies are appended.
    fetches_end_s, loads_end_s: when these streams end, as far as known so far.
    waiting_to_store: units to be stored, in their order.
    stored_s: by unit on the host or the disk, the end of the copy that took it off the device.
    free_after_s: the same, until the code that frees the unit removes the entry.
    """

    def __init__(
        self,
        places: Places,
        *,
        names: Sequence[str],
        unit_bytes: Sequence[int],
        to_disk: Collection[int],
        ops: list[Op],
    ) -> None:
        """Start with empty places.

        to_disk: the units that go on to the disk.
        """
        assert places.host is not None
        self.host, self.disk = places.host, places.disk
        self.names, self.unit_bytes, self.ops = names, unit_bytes, ops
        self.to_disk = frozenset(to_disk)
        largest = max((unit_bytes[u] for u in self.to_disk), default=0)
        most_bytes = self.host.capacity_bytes
        self._most_kept_bytes = most_bytes - largest * (2 if 4 * largest <= most_bytes else 1)
        self._kept_bytes = self._host_bytes = 0
        self._stores_end_s = self.fetches_end_s = self._spills_end_s = self.loads_end_s = 0.0
        self._host_free_s = self._disk_free_s = 0.0
        # by unit: when its copy is complete, and when no stream reads or writes it any more
        self._on_host: dict[int, tuple[float, float]] = {}
        self._on_disk: dict[int, tuple[float, float]] = {}
        self._awaiting_fetch: set[int] = set()  # loaded, to be fetched
        self.waiting_to_store: list[int] = []
        self.stored_s: dict[int, float] = {}
        self.free_after_s: dict[int, float] = {}

    @property
    def end_s(self) -> float:
        return max(self._stores_end_s, self.fetches_end_s, self._spills_end_s, self.loads_end_s)

    def is_on_host(self, u: int) -> bool:
        return u in self._on_host

    def disk_to_device_s(self, u: int) -> float:
        """Seconds to copy the unit from the disk to the device."""
        assert self.disk is not None
        size_bytes = self.unit_bytes[u]
        return self.disk.link.in_s(size_bytes) + self.host.link.in_s(size_bytes)

    def store_waiting(self, now_s: float, on_device: Callable[[int], bool]) -> None:
        """Store the waiting units for which there is room, in order.

        on_device: whether a waiting unit is still on the device.
        """
        self._give_up_passing(now_s)
        blocked: set[bool] = set()
        for u in tuple(self.waiting_to_store):
            if not on_device(u):
                self.waiting_to_store.remove(u)
            elif (u in self.to_disk) not in blocked:
                if self._has_room(u):
                    self._store(u, now_s)
                else:
                    blocked.add(u in self.to_disk)

    def store_one_now(self, units: Collection[int], now_s: float) -> bool:
        """Store the first of these units that waits, giving up passing copies; False: none fits."""
        for u in tuple(self.waiting_to_store):
            is_eligible = u in units and (u in self.to_disk or self._may_stay_on_host(u))
            if is_eligible and self._make_room(self.unit_bytes[u]):
                self._store(u, now_s)
                return True
        return False

    def load(self, u: int, now_s: float, *, make_room: bool) -> bool:
        """Copy a unit from the disk to the host; False: there is no room.

        make_room: give up passing copies for room.
        """
        assert self.disk is not None
        size_bytes = self.unit_bytes[u]
        self._give_up_passing(now_s)
        if make_room:
            self._make_room(size_bytes)
        if self._host_bytes + size_bytes > self.host.capacity_bytes:
            return False
        complete_s, busy_s = self._on_disk[u]
        start_s = max(self.loads_end_s, now_s, complete_s, self._host_free_s)
        self.loads_end_s = end_s = start_s + self.disk.link.in_s(size_bytes)
        self._on_disk[u] = complete_s, max(busy_s, end_s)
        self._on_host[u] = end_s, end_s
        self._host_bytes += size_bytes
        self._awaiting_fetch.add(u)
        self.ops.append(Load(self.names[u]))
        return True

    def fetch(self, u: int, now_s: float) -> float:
        """Copy a unit back to the device, from the disk if necessary; returns when it is there."""
        if u not in self._on_host:
            self.load(u, now_s, make_room=True)
        complete_s, busy_s = self._on_host[u]
        self.fetches_end_s = max(self.fetches_end_s, now_s, complete_s) + self.host.link.in_s(
            self.unit_bytes[u]
        )
        self._on_host[u] = complete_s, max(busy_s, self.fetches_end_s)
        self._awaiting_fetch.discard(u)
        self.ops.append(Fetch(self.names[u]))
        return self.fetches_end_s

    def delete_copies(self, u: int) -> None:
        """Delete the unit's copies: it need not come back any more."""
        if u in self.waiting_to_store:
            self.waiting_to_store.remove(u)
        self.stored_s.pop(u, None)
        if u in self._on_host:
            self._drop(u)
        if u in self._on_disk:
            self._disk_free_s = max(self._disk_free_s, self._on_disk.pop(u)[1])
            self.ops.append(Delete(self.names[u]))

    def _may_stay_on_host(self, u: int) -> bool:
        return self._kept_bytes + self.unit_bytes[u] <= self._most_kept_bytes

    def _has_room(self, u: int) -> bool:
        fits = self._host_bytes + self.unit_bytes[u] <= self.host.capacity_bytes
        return fits and (u in self.to_disk or self._may_stay_on_host(u))

    def _store(self, u: int, now_s: float) -> None:
        size_bytes = self.unit_bytes[u]
        self.waiting_to_store.remove(u)
        start_s = max(self._stores_end_s, now_s, self._host_free_s)
        end_s = self._stores_end_s = start_s + self.host.link.out_s(size_bytes)
        self.stored_s[u] = self.free_after_s[u] = end_s
        self._host_bytes += size_bytes
        self._on_host[u] = end_s, end_s
        self.ops.append(Store(self.names[u]))
        if u not in self.to_disk:
            self._kept_bytes += size_bytes
            return
        assert self.disk is not None
        start_s = max(self._spills_end_s, now_s, end_s, self._disk_free_s)
        self._spills_end_s = start_s + self.disk.link.out_s(size_bytes)
        self._on_disk[u] = self._spills_end_s, self._spills_end_s
        self._on_host[u] = end_s, self._spills_end_s
        self.ops.append(Spill(self.names[u]))

    def _passing_units(self) -> list[int]:
        """Units whose copy on the host may be given up, those that no fetch waits for first."""
        found = [u for u in self._on_host if u in self._on_disk]
        return sorted(found, key=lambda u: (u in self._awaiting_fetch, self._on_host[u][1], u))

    def _give_up_passing(self, now_s: float) -> None:
        """Give up the copies of what the disk has by now and of what has been fetched."""
        for u in self._passing_units():
            if u not in self._awaiting_fetch and self._on_host[u][1] <= now_s:
                self._drop(u)

    def _make_room(self, size_bytes: int) -> bool:
        """Give up passing copies until there is room, however long their copies still take."""
        for u in self._passing_units():
            if self._host_bytes + size_bytes <= self.host.capacity_bytes:
                break
            self._drop(u)
        return self._host_bytes + size_bytes <= self.host.capacity_bytes

    def _drop(self, u: int) -> None:
        size_bytes = self.unit_bytes[u]
        self._host_free_s = max(self._host_free_s, self._on_host.pop(u)[1])
        self._host_bytes -= size_bytes
        self._kept_bytes -= 0 if u in self.to_disk else size_bytes
        self._awaiting_fetch.discard(u)
        self.ops.append(Drop(self.names[u]))


def goes_to_disk(
    stays: Sequence[tuple[int, int, int]], unit_bytes: Sequence[int], places: Places
) -> frozenset[int]:
    """The units that go on to the disk so that the host has room for the others.

    What is away longest goes first, as long as the disk has room; none if the host has room for
    all.
    stays: (first, last, unit): the unit is away between these positions, over all of its gaps.
    """
    if places.host is None or places.disk is None:
        return frozenset()
    most_bytes, left_bytes = places.host_bytes, places.disk_bytes
    candidates: list[int] = []
    for _, _, u in sorted(stays, key=lambda stay: (stay[0] - stay[1], stay[2])):
        if u not in candidates and unit_bytes[u] <= min(left_bytes, most_bytes):
            candidates.append(u)
            left_bytes -= unit_bytes[u]

    def fits(n_chosen: int) -> bool:
        chosen = frozenset(candidates[:n_chosen])
        passing_bytes = 2 * max((unit_bytes[u] for u in chosen), default=0)
        kept = [stay for stay in stays if stay[2] not in chosen]
        return _peak_bytes(kept, unit_bytes) + passing_bytes <= most_bytes

    return frozenset(candidates[: bisect_left(range(len(candidates)), True, key=fits)])


def _peak_bytes(stays: Sequence[tuple[int, int, int]], unit_bytes: Sequence[int]) -> int:
    """The most bytes that are away at the same time."""
    change: dict[int, int] = {}
    for first, last, u in stays:
        change[first] = change.get(first, 0) + unit_bytes[u]
        change[last] = change.get(last, 0) - unit_bytes[u]
    return max(accumulate(change[position] for position in sorted(change)), default=0)
