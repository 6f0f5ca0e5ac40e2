"""Host memory, and a disk behind it, that storages can be copied to."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphs.files import FormatError, Record


@dataclass(frozen=True)
class Link:
    """A connection for copies away from the device (out) and towards it (in).

    The two directions do not share bandwidth.

    out_bytes_per_s, in_bytes_per_s: the rates.
    latency_s: seconds that each copy takes in addition, independent of its size.

    Raises ValueError for a rate that is not above zero and finite, and for a latency that is below
    zero or infinite.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("out_bytes_per_s", "in_bytes_per_s"):
            rate = getattr(self, name)
            if not (0 < rate < math.inf):
                raise ValueError(f"{name} of a link is {rate}; it must be above 0 and finite")
        if not (0 <= self.latency_s < math.inf):
            raise ValueError(f"latency_s of a link is {self.latency_s}; it must be 0 or more")

    def out_s(self, size_bytes: int) -> float:
        """Seconds of one copy away from the device."""
        return self.latency_s + size_bytes / self.out_bytes_per_s

    def in_s(self, size_bytes: int) -> float:
        """Seconds of one copy towards the device."""
        return self.latency_s + size_bytes / self.in_bytes_per_s


@dataclass(frozen=True)
class Place:
    """A memory of `capacity_bytes` that is reached over a link.

    Raises ValueError for a capacity that is not above zero.
    """

    capacity_bytes: int
    link: Link

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise ValueError(
                f"capacity_bytes of a place is {self.capacity_bytes}; it must be above 0 "
                "(for no such place, leave it out)"
            )


@dataclass(frozen=True)
class Places:
    """The memory that a step may copy to besides the device.

    host: pinned host memory; its link is the one to the device.
    disk: reached from the host, so it needs a host; its link is between host and disk.
    disk_directory: where the file for the copies is made ("": to be given to `apply`).

    Raises ValueError for a disk without a host, and for a directory without a disk.
    """

    host: Place | None = None
    disk: Place | None = None
    disk_directory: str = ""

    def __post_init__(self) -> None:
        if self.disk is not None and self.host is None:
            raise ValueError("places have a disk and no host; a copy to disk goes through the host")
        if self.disk_directory and self.disk is None:
            raise ValueError("places have a directory and no disk")

    def without_state(self, host_state_bytes: int) -> Places | None:
        """The places without the host memory that optimizer state and parameters occupy for the
        whole step (None: they leave none for copies).

        host_state_bytes: see `graphs.graph.Graph`.
        """
        if self.host is None or not host_state_bytes:
            return self
        left_bytes = self.host.capacity_bytes - host_state_bytes
        host = replace(self.host, capacity_bytes=left_bytes) if left_bytes > 0 else None
        return None if host is None else replace(self, host=host)

    @property
    def host_bytes(self) -> int:
        return 0 if self.host is None else self.host.capacity_bytes

    @property
    def disk_bytes(self) -> int:
        return 0 if self.disk is None else self.disk.capacity_bytes

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, value: object, *, source: str) -> Places:
        """Read what `to_json` returns. Raises FormatError naming the field."""
        record = Record(value, where=source)
        try:
            return cls(
                host=_read_place(record, "host"),
                disk=_read_place(record, "disk"),
                disk_directory=record.string("disk_directory", default=""),
            )
        except ValueError as error:
            raise FormatError(f"{source}: {error}") from error


def _read_place(record: Record, name: str) -> Place | None:
    """Read the place of this name (None: it is not in the record)."""
    item = record.record(name, default=None)
    if item is None:
        return None
    link = item.record("link")
    return Place(
        capacity_bytes=item.integer("capacity_bytes"),
        link=Link(
            out_bytes_per_s=link.number("out_bytes_per_s"),
            in_bytes_per_s=link.number("in_bytes_per_s"),
            latency_s=link.number("latency_s", default=0.0),
        ),
    )
