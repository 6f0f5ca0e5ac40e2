"""Known kinds of disks and their rates, as the manufacturers publish them.

    disk_named("nvme4").write_bytes_per_s

Each entry is one drive of its kind at its best: long sequential writes and reads while the drive is
cool and its write cache is not full. A server's drive may write at half that rate, and a drive that
has been written to for minutes is slower still. Where the plan will run, measure instead
(`--disk-rate measured`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphs.hardware.devices import name_key


@dataclass(frozen=True)
class Disk:
    """One kind of disk.

    name: as users give it.
    write_bytes_per_s, read_bytes_per_s: rates of long sequential writes and reads.
    source: the drive that has these rates, and where they are published.
    """

    name: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    source: str


# fmt: off
DISKS: Mapping[str, Disk] = {disk.name: disk for disk in (
    Disk("sata", 0.53e9, 0.56e9,
         "Samsung 870 EVO, by its maker (AnandTech's review 16480 finds them sustained)"),
    Disk("nvme3", 2.3e9, 3.5e9,
         "Samsung 970 PRO 512 GB, PCI Express 3, by its maker (pugetsystems.com, part 12735)"),
    Disk("nvme4", 6.9e9, 7.45e9,
         "Samsung 990 PRO, PCI Express 4, by its maker (slashcam.com, news 17407, for reading)"),
    Disk("nvme5", 13.4e9, 14.7e9,
         "Samsung 9100 PRO 2 TB, PCI Express 5, by its maker (techpowerup.com)"),
)}
# fmt: on


def disk_named(name: object) -> Disk | None:
    """The kind of disk of that name; case, spaces, "-" and "_" do not matter. None: unknown."""
    return _BY_KEY.get(name_key(name)) if isinstance(name, str) else None


_BY_KEY = {name_key(name): disk for name, disk in DISKS.items()}
