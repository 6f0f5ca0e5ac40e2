"""Parse and measure the disk that a plan may copy to by way of host memory."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from pathlib import Path

from graphs.hardware import DISKS, disk_named
from solver.schedule import Link, Place, Places
from solver.sizes_deadlines_progress import (
    BudgetError,
    Rates,
    format_size,
    parse_rates,
    parse_size,
    reject_missing_unit,
    reject_share,
)

MEASURED = "measured"
MEASURED_BYTES, BLOCK_BYTES = 2**28, 2**22


def with_disk(
    places: Places | None,
    budget: str | int | float | None,
    rate: Rates | None = None,
    *,
    costs: object = None,
    resident_bytes: int = 0,
) -> Places | None:
    """Return the places with a disk behind the host, or unchanged if no disk budget is given.

    budget: bytes of the disk, with or without the directory that the plan will use when it runs:
        "500GB:/scratch", "500GB", 5e11.
    rate: bytes per second for writing and reading, "5GB/s" or one for each, "5GB/s,6GB/s"; a kind
        of disk such as "nvme4", for its published rates; or "measured", with a file that is written
        to the directory and read (the default if `costs`, the step's, are measured too).
    resident_bytes: resident bytes of the step, to reject "500" if 500 GB was meant.

    Raises BudgetError for an invalid size, rate or directory, for a size without a rate or a rate
    without a size, and without a host: every copy to the disk goes through host memory.
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
    if rate is None and directory and hasattr(type(costs), "host_copies"):
        rate = MEASURED
    if rate is None:
        raise BudgetError(
            "the disk's rates are unknown; measure them (--disk-rate measured), name its kind "
            f"({', '.join(DISKS)}), or give those of writing and reading (--disk-rate 5GB/s,6GB/s, "
            "or in Python disk_rate='5GB/s,6GB/s')"
        )
    if isinstance(budget, str) and ":" in budget:
        _check_writable(directory)
    if rate == MEASURED and not directory:
        raise BudgetError(
            "the disk's rates are measured in its directory, and none is given; write "
            "500GB:/scratch"
        )
    rates = given_rates(rate) or measured_rates(directory)
    disk = Place(capacity_bytes, Link(*rates))
    return dataclasses.replace(places, disk=disk, disk_directory=directory)


def given_rates(rate: Rates) -> tuple[float, float] | None:
    """Parse the rates of a disk: (written, read) in bytes per second, or None if they are to be
    measured. Raises BudgetError if they are invalid."""
    if rate == MEASURED:
        return None
    if (disk := disk_named(rate)) is not None:
        return disk.write_bytes_per_s, disk.read_bytes_per_s
    if isinstance(rate, str) and rate.strip()[:1].isalpha():
        raise BudgetError(
            f"invalid disk rate {rate!r}: a kind of disk ({', '.join(DISKS)}), {MEASURED}, or "
            "bytes per second: 5GB/s,6GB/s"
        )
    return parse_rates(rate, what="disk rate", example="5GB/s,6GB/s")


def measured_rates(directory: str) -> tuple[float, float]:
    """Measure a disk: bytes per second written, with fsync, and read, without the page cache.

    Writes a temporary file of MEASURED_BYTES. Raises BudgetError if that fails, for example because
    the disk is full.
    """
    block = os.urandom(BLOCK_BYTES)  # random, since some disks compress
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            started_s = time.perf_counter()
            for at in range(0, MEASURED_BYTES, BLOCK_BYTES):
                os.pwrite(file.fileno(), block, at)
            os.fsync(file.fileno())
            write_end_s = time.perf_counter()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            read_start_s = time.perf_counter()
            for at in range(0, MEASURED_BYTES, BLOCK_BYTES):
                os.pread(file.fileno(), BLOCK_BYTES, at)
            read_end_s = time.perf_counter()
    except OSError as error:
        raise BudgetError(
            f"disk {directory!r}: its rates cannot be measured ({error.strerror}); measuring takes "
            f"{format_size(MEASURED_BYTES)} of it. Or give them (--disk-rate 5GB/s,6GB/s)"
        ) from error
    return MEASURED_BYTES / (write_end_s - started_s), MEASURED_BYTES / (read_end_s - read_start_s)


def disk_directory(budget: str | int | float | None) -> str:
    """The directory in "500GB:/scratch"; "" if there is none."""
    return str(budget).partition(":")[2]


def _check_writable(directory: str) -> None:
    """Raise BudgetError if no file can be created in the directory."""
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
