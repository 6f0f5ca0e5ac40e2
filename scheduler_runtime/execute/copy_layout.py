"""Where each copy lies in the memory of the host and in the file on the disk.

A schedule says when each copy comes and goes, so all addresses are known before the step: one block
of host memory and one file serve every step, and nothing is allocated while it runs. The largest
copy is placed first, each at the lowest address that is free for all of its stay. That may take
more than the most bytes that are there at once, by what is lost between copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from solver.common import format_both
from solver.schedule import Delete, Drop, Load, Places, Schedule, Spill, Store, name_in

ALIGNMENTS = (512, 1)
"""In bytes: copies are faster from round addresses. The next is tried where one takes too much."""


@dataclass(frozen=True)
class CopyLayout:
    """host_bytes, disk_bytes: of the block and of the file.

    address: position in the schedule of a copy to the host or the disk -> its first byte there.
    """

    host_bytes: int
    disk_bytes: int
    address: Mapping[int, int]


@dataclass(frozen=True)
class _Stay:
    start: int
    stop: int
    size_bytes: int


def copy_layout(graph: Graph, schedule: Schedule, places: Places | None) -> CopyLayout:
    """Raises ValueError where the copies, side by side, take more than there is."""
    places = places or Places()
    addresses: dict[int, int] = {}
    totals = []
    for title, place, comes, goes in (
        ("host", places.host, (Store, Load), Drop),
        ("disk", places.disk, (Spill,), Delete),
    ):
        stays = _stays(graph, schedule, comes, goes)
        most_bytes = None if place is None else place.capacity_bytes
        for align in ALIGNMENTS:
            found = _packed(stays, align)
            total = max((at + s.size_bytes for at, s in zip(found, stays, strict=True)), default=0)
            if most_bytes is None or total <= most_bytes:
                break
        else:
            raise ValueError(
                f"the copies on the {title}, side by side, take {format_both(total)}, and the plan "
                f"may use {format_both(most_bytes or 0)} there; plan with a few percent less"
            )
        addresses |= {stay.start: at for stay, at in zip(stays, found, strict=True)}
        totals.append(total)
    return CopyLayout(totals[0], totals[1], addresses)


def _stays(
    graph: Graph, schedule: Schedule, comes: tuple[type, ...], goes: type
) -> Sequence[_Stay]:
    started: dict[str, int] = {}
    stays = []

    def end(storage: str, stop: int) -> None:
        size_bytes = graph.tensor_by_name[storage].size_bytes
        stays.append(_Stay(started.pop(storage), stop, size_bytes))

    for position, op in enumerate(schedule.ops):
        if isinstance(op, comes):
            started[name_in(op)] = position
        elif isinstance(op, goes):
            end(name_in(op), position)
    for storage in tuple(started):
        end(storage, len(schedule.ops))
    return stays


def _packed(stays: Sequence[_Stay], align: int) -> list[int]:
    """The address of each."""
    found = [0] * len(stays)
    placed: list[int] = []
    for i in sorted(range(len(stays)), key=lambda i: (-stays[i].size_bytes, stays[i].start)):
        stay, at = stays[i], 0
        beside = (j for j in placed if stays[j].start < stay.stop and stay.start < stays[j].stop)
        for start, stop in sorted((found[j], found[j] + stays[j].size_bytes) for j in beside):
            if start - at >= stay.size_bytes:
                break
            at = max(at, -(-stop // align) * align)
        found[i] = at
        placed.append(i)
    return found
