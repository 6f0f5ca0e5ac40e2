"""Sizes as people write them: 16GB, 15.5GiB, 800MB, 60%, and back."""

from __future__ import annotations

import re
from fractions import Fraction

from solver.common.format import counted

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {unit.removesuffix("B"): size for unit, size in _UNITS.items() if len(unit) > 1}
_NUMBER = r"[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][0-9]{1,2}(?![0-9a-zA-Z]))?|\.[0-9]{1,30}"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([a-zA-Z]*|%)\s*")
_RIGHT = "write 16GB, 15.5GiB, 800MB, 60% or a number of bytes"

CUDA_RESERVE_BYTES = 750 * 10**6
"""What a step on a CUDA device leaves free unless the caller says otherwise.

The context with every kernel of PyTorch loaded takes 667 MB, 287 MB when kernels load as they are
used (measured in pytorch#86509); cuBLAS keeps a workspace of up to 32 MiB; the allocator takes
memory in segments of 2 and 20 MiB, of which the last ones stay partly empty. Fragmentation beyond
that is not in it.
"""


class BudgetError(ValueError):
    """The text is no size that can be planned for."""


def parse_size(
    text: str | int | float,
    *,
    capacity_bytes: int | None = None,
    what: str = "budget",
    least_bytes: int = 1,
) -> int:
    """Bytes of "16GB" or "16G" (10^9), "15.5GiB" or "15.5Gi" (2^30), "800MB", "123456", 123456 or
    1e9, rounded down.

    "60%" is a share of `capacity_bytes`, the named device's memory. `what` is the size's name in
    messages. Raises BudgetError for what is no size, for less than `least_bytes`, and for a
    percentage of a device whose capacity is unknown, or above all of it.
    """
    shown = f"{what} {_shown(text)}"
    if isinstance(text, float) and not text.is_integer():
        raise BudgetError(f"{shown} is no whole number of bytes; {_RIGHT}")
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise BudgetError(f"{shown} is no size; {_RIGHT}")
    if isinstance(text, str) and text.strip().startswith("-"):
        raise BudgetError(f"{shown} is negative; {_RIGHT}")
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = match.group(2).upper() if match else ""
    if isinstance(text, str) and (match is None or (unit != "%" and unit not in _UNITS)):
        raise BudgetError(f"{shown} is no size; {_RIGHT}")
    amount = Fraction(match.group(1)) if match else Fraction(int(text))
    if not unit and amount.denominator != 1:
        raise BudgetError(f"{shown} is no whole number of bytes; {_RIGHT}")
    if unit == "%":
        size_bytes = _share(amount, capacity_bytes, shown)
    else:
        size_bytes = int(amount * _UNITS[unit])
    if size_bytes < least_bytes:
        least = "above zero" if least_bytes == 1 else f"at least {least_bytes}"
        raise BudgetError(f"{shown} is {size_bytes} bytes; it must be {least}")
    if size_bytes > 2**60:
        raise BudgetError(f"{shown} is more than an exbibyte (2**60 bytes)")
    return size_bytes


SMALLEST_BARE_BYTES = 10**6
"""A bare number below it that is too small for the step was meant in another unit."""


def refuse_bare(text: object, *, resident_bytes: int, what: str = "budget") -> None:
    """Raises BudgetError for "16" where what stays on the device is larger by itself.

    Only what was written as text and without a unit, and is less than SMALLEST_BARE_BYTES: that is
    no step's memory. A number of bytes that is not absurd stays one.
    """
    if not isinstance(text, str) or not text.strip().isascii() or not text.strip().isdigit():
        return
    size_bytes = parse_size(text, what=what)
    if size_bytes < min(SMALLEST_BARE_BYTES, resident_bytes):
        raise BudgetError(
            f"{what} {_shown(text)} is {counted(size_bytes, 'byte')}; parameters, optimizer state "
            f"and batch alone take {format_both(resident_bytes)}. Write {size_bytes}GB for "
            "gigabytes"
        )


def _share(percent: Fraction, capacity_bytes: int | None, shown: str) -> int:
    if capacity_bytes is None:
        raise BudgetError(
            f"{shown} is a share of the device's memory, which is not known here; "
            "name a device that has one (--device h100), or give bytes"
        )
    if percent > 100:
        raise BudgetError(f"{shown} is more than the device has ({format_both(capacity_bytes)})")
    return int(percent * capacity_bytes / 100)


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def format_size(size_bytes: int | float) -> str:
    """Decimal units with three figures or more: "16.00 GB", "812.4 MB", "512 B"."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if abs(size_bytes) >= factor:
            amount = size_bytes / factor
            return f"{amount:.2f} {unit}" if amount < 100 else f"{amount:.1f} {unit}"
    return f"{int(size_bytes)} B"


def format_both(size_bytes: int) -> str:
    """In both units: "16.00 GB (14.90 GiB)", and bytes alone below a kibibyte."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{format_size(size_bytes)} ({size_bytes / factor:.2f} {unit})"
    return f"{size_bytes} B"
