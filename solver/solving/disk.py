"""The disk that a plan may copy to, by way of host memory, as users write it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from solver.schedule import Link, Place, Places
from solver.sizes_deadlines_progress import (
    BudgetError,
    parse_rate,
    parse_size,
    reject_missing_unit,
    reject_share,
)

Rate: TypeAlias = str | int | float
DiskRate: TypeAlias = Rate | Sequence[Rate]


def disk_behind(
    places: Places | None,
    budget: str | int | float | None,
    rate: DiskRate | None = None,
    *,
    resident_bytes: int = 0,
) -> Places | None:
    """The places with the disk behind the host; as they are where no budget of it is given.

    budget: bytes, and perhaps the directory that the plan is run with: "500GB:/scratch", "500GB",
        5e11.
    rate: bytes per second that it writes, "5GB/s", or writes and reads: "5GB/s,6GB/s".
    resident_bytes: of the step, to reject "500" where 500 GB was meant.

    Raises BudgetError for an invalid size, rate or directory, one without the other, and where
    there is no host: every copy to the disk goes through its memory.
    """
    if budget is None:
        if rate is not None:
            raise BudgetError(
                f"a rate of the disk is given ({rate!r}) but no disk; say how much of one a plan "
                "may use (--disk 500GB:/scratch, or in Python disk_budget='500GB:/scratch')"
            )
        return places
    if places is None or places.host is None:
        raise BudgetError(
            f"a disk is given ({budget!r}) and no host memory, through which every copy to it "
            "goes; give some (--host 8GB, or in Python host_budget='8GB')"
        )
    size, _, _ = str(budget).partition(":")
    directory = disk_directory(budget)
    reject_share(size, what="disk budget")
    capacity_bytes = parse_size(size if isinstance(budget, str) else budget, what="disk budget")
    reject_missing_unit(size, resident_bytes=resident_bytes, what="disk budget")
    if rate is None:
        raise BudgetError(
            "the disk's rates are unknown; measure them, and give those of writing and reading"
            " (--disk-rate 5GB/s,6GB/s, or in Python disk_rate='5GB/s,6GB/s')"
        )
    words = rate.split(",") if isinstance(rate, str) else rate
    parts = words if isinstance(words, Sequence) else [words]
    if len(parts) not in (1, 2):
        raise BudgetError(f"invalid disk rate {rate!r}: write 5GB/s, or OUT,IN: 5GB/s,6GB/s")
    rates = [parse_rate(part, what="disk rate") for part in parts]
    if isinstance(budget, str) and ":" in budget:
        _check_writable(directory)
    disk = Place(capacity_bytes, Link(rates[0], rates[-1]))
    return dataclasses.replace(places, disk=disk, disk_directory=directory)


def disk_directory(budget: str | int | float | None) -> str:
    """What stands behind the size in "500GB:/scratch"; "" for none."""
    return str(budget).partition(":")[2]


def _check_writable(directory: str) -> None:
    """Raises BudgetError where no file can be made there."""
    if not directory:
        raise BudgetError("invalid disk: no directory after the colon; write 500GB:/scratch")
    if not Path(directory).is_dir():
        raise BudgetError(f"disk {directory!r}: no such directory; name one on the disk")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise BudgetError(
            f"disk {directory!r}: no file can be written there ({error.strerror}); name another "
            "directory"
        ) from error
