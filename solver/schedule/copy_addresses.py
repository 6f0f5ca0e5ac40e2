"""The address of each copy in host memory and in the file on the disk.

A schedule says when each copy is made and given up, so all addresses can be planned before the
step: one block of host memory and one file serve every step, and nothing is allocated while it
runs. The copies are placed one by one, each at the lowest address that is free for its whole stay.
Gaps between copies may make the block larger than the most bytes of copies at any one time. If it
is then larger than the place's capacity, other orders of placing are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphs.graph import Graph
from solver.schedule.host_and_disk import Places
from solver.schedule.ops import Delete, Drop, Load, Schedule, Spill, Store, name_in
from solver.sizes_deadlines_progress import format_both

ALIGNMENTS = (512, 1)
"""Alignments of the addresses in bytes: copies from aligned addresses are faster. The second is
tried if the first takes too much memory."""


@dataclass(frozen=True)
class CopyLayout:
    """The addresses of all copies of a schedule.

    host_bytes, disk_bytes: sizes of the block of host memory and of the file.
    address: position in the schedule of each copy to the host or the disk -> the offset of its
        first byte in the block or the file.
    """

    host_bytes: int
    disk_bytes: int
    address: Mapping[int, int]

    def excess(self, places: Places | None) -> str:
        """A message if the block or the file exceeds its place's capacity; "" if both fit."""
        places = places or Places()
        for title, place, total_bytes in (
            ("host", places.host, self.host_bytes),
            ("disk", places.disk, self.disk_bytes),
        ):
            if place is not None and total_bytes > place.capacity_bytes:
                return (
                    f"the copies on the {title}, side by side, take {format_both(total_bytes)}, "
                    f"and the plan may use {format_both(place.capacity_bytes)} there"
                )
        return ""


@dataclass(frozen=True)
class _Stay:
    """A copy that is at its place from position `start` of the schedule to before `stop`."""

    start: int
    stop: int
    size_bytes: int


ORDERS: Sequence[Callable[[_Stay], Any]] = (
    lambda stay: (-stay.size_bytes, stay.start),
    lambda stay: ((stay.start - stay.stop) * stay.size_bytes, stay.start),
    lambda stay: (stay.start - stay.stop, -stay.size_bytes),
)
"""Sort keys for the order of placing: the largest copies first; those of the largest area (bytes
times ops) first; those that stay longest first."""


def copy_layout(graph: Graph, schedule: Schedule, places: Places | None) -> CopyLayout:
    """Return the first layout found that fits the capacities, or the smallest one if none fits.

    places: host and disk with their capacities; a place that is missing has no limit.
    """
    places = places or Places()
    addresses: dict[int, int] = {}
    totals = []
    for place, comes, goes in (
        (places.host, (Store, Load), Drop),
        (places.disk, (Spill,), Delete),
    ):
        stays = _stays(graph, schedule, comes, goes)
        found, total_bytes = _place_within(stays, None if place is None else place.capacity_bytes)
        addresses |= {stay.start: at for stay, at in zip(stays, found, strict=True)}
        totals.append(total_bytes)
    return CopyLayout(totals[0], totals[1], addresses)


def _place_within(stays: Sequence[_Stay], most_bytes: int | None) -> tuple[Sequence[int], int]:
    """The addresses of the stays, and the bytes that they take in all.

    most_bytes: the capacity (None: no limit).
    """
    best: tuple[Sequence[int], int] = ((), 0)
    for align in ALIGNMENTS:
        for rank in ORDERS:
            addresses = _place_first_fit(stays, align, rank)
            total_bytes = max(
                (at + stay.size_bytes for at, stay in zip(addresses, stays, strict=True)), default=0
            )
            if not best[0] or total_bytes < best[1]:
                best = addresses, total_bytes
            if most_bytes is None or total_bytes <= most_bytes:
                return addresses, total_bytes
    return best


def _stays(
    graph: Graph, schedule: Schedule, arriving_ops: tuple[type, ...], leaving_ops: type
) -> Sequence[_Stay]:
    """All stays of copies at one place.

    arriving_ops, leaving_ops: the ops that make and give up copies there.
    """
    started: dict[str, int] = {}
    spans = []
    for position, op in enumerate(schedule.ops):
        if isinstance(op, arriving_ops):
            started[name_in(op)] = position
        elif isinstance(op, leaving_ops):
            spans.append((name_in(op), started.pop(name_in(op)), position))
    spans += [(name, start, len(schedule.ops)) for name, start in started.items()]
    sizes = graph.tensor_by_name
    return [_Stay(start, stop, sizes[name].size_bytes) for name, start, stop in spans]


def _place_first_fit(
    stays: Sequence[_Stay], align: int, rank: Callable[[_Stay], Any]
) -> Sequence[int]:
    """The address of each stay, placed in the order of `rank`, each at the lowest address that is
    free for its whole stay."""
    addresses = [0] * len(stays)
    placed: list[int] = []
    for i in sorted(range(len(stays)), key=lambda i: rank(stays[i])):
        stay, address = stays[i], 0
        overlapping = (
            j for j in placed if stays[j].start < stay.stop and stay.start < stays[j].stop
        )
        for start, stop in sorted(
            (addresses[j], addresses[j] + stays[j].size_bytes) for j in overlapping
        ):
            if start - address >= stay.size_bytes:
                break
            address = max(address, -(-stop // align) * align)
        addresses[i] = address
        placed.append(i)
    return addresses
