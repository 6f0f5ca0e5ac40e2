"""Sizes as people write them: 16GB, 15.5GiB, 800MB, 60%, and back."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*|%)\s*")


class BudgetError(ValueError):
    """The text is no size that can be planned for."""


def parse_size(text: str | int, *, capacity_bytes: int | None = None) -> int:
    """Bytes of "16GB" (10^9), "15.5GiB" (2^30), "800MB", "1TB", "123456" or 123456, rounded down.

    "60%" is a share of `capacity_bytes`, the named device's memory. Raises BudgetError for what is
    no size, for zero, and for a percentage of a device whose capacity is unknown.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise BudgetError(f"{text!r} is no size; write 16GB, 15.5GiB, 60% or a number of bytes")
    match = _SIZE.fullmatch(str(text))
    unit = match.group(2).upper() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise BudgetError(f"{text!r} is no size; write 16GB, 15.5GiB, 800MB, 60% or bytes")
    amount = Fraction(match.group(1))
    if unit == "%":
        if capacity_bytes is None:
            raise BudgetError(
                f"{text!r} is a share of the device's memory, which is not known here; "
                "name a device with --device, or give bytes"
            )
        size_bytes = int(amount * capacity_bytes / 100)
    else:
        size_bytes = int(amount * _UNITS[unit])
    if size_bytes <= 0:
        raise BudgetError(f"{text!r} is {size_bytes} bytes; a budget must be above zero")
    if size_bytes > 2**60:
        raise BudgetError(f"{text!r} is more than an exbibyte")
    return size_bytes


def format_size(size_bytes: int | float) -> str:
    """Decimal units with three figures or more: "16.00 GB", "812.4 MB", "512 B"."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if abs(size_bytes) >= factor:
            amount = size_bytes / factor
            return f"{amount:.2f} {unit}" if amount < 100 else f"{amount:.1f} {unit}"
    return f"{int(size_bytes)} B"


def format_both(size_bytes: int) -> str:
    """In both units: "16.00 GB (14.90 GiB)"."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{format_size(size_bytes)} ({size_bytes / factor:.2f} {unit})"
    return f"{size_bytes} B"
