"""Parse and format sizes as people write them: 16GB, 15.5GiB, 800MB, 60%."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import TypeAlias

from solver.sizes_deadlines_progress.cli_or_python_wording import IN_PYTHON, Reader
from solver.sizes_deadlines_progress.format import counted

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {unit.removesuffix("B"): size for unit, size in _UNITS.items() if len(unit) > 1}
_NUMBER = r"[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][0-9]{1,2}(?![0-9a-zA-Z]))?|\.[0-9]{1,30}"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([a-zA-Z]*|%)\s*")
_VALID = "write 16GB, 15.5GiB, 800MB, 60% or a number of bytes"

CUDA_RESERVE_BYTES = 750 * 10**6
"""The default reserve on a CUDA device.

The context takes 667 MB with every kernel of PyTorch loaded, 287 MB with lazy loading (measured in
pytorch#86509); the allocator requests segments of 2 and 20 MiB, the last of which are partly empty.
Fragmentation beyond that is not included. Workspaces of cuBLAS are counted in the peak.
"""


class BudgetError(ValueError):
    """A budget, reserve or rate is invalid, or nothing fits the budget."""


class UnknownCapacityError(BudgetError):
    """A share of the device's memory was given, but its size is unknown."""


def parse_budget(
    budget: str | int | float,
    reserve: str | int | float | None = None,
    *,
    capacity_bytes: int | None = None,
    on_cuda: bool = False,
    resident_bytes: int = 0,
    reader: Reader = IN_PYTHON,
) -> tuple[int, int]:
    """Return (budget_bytes, reserve_bytes); the reserve is the part that the step may not use.

    budget: as `parse_size` takes it.
    reserve: likewise (None: CUDA_RESERVE_BYTES for a step on CUDA, else 0).
    capacity_bytes: the device's memory, which percentages refer to.
    resident_bytes: resident bytes of the step, to reject "16" if 16 GB was meant
        (`reject_missing_unit`).
    reader: whether the error names command-line options or Python arguments.

    Raises BudgetError if either is invalid or the reserve leaves nothing of the budget.
    """
    budget_bytes = parse_size(budget, capacity_bytes=capacity_bytes)
    if reserve is None:
        reserve = CUDA_RESERVE_BYTES if on_cuda else 0
    reserve_bytes = parse_size(
        reserve, capacity_bytes=capacity_bytes, what="reserve", least_bytes=0
    )
    reject_missing_unit(budget, resident_bytes=resident_bytes)
    if reserve_bytes >= budget_bytes:
        outside = ", and nothing to the CUDA context" if on_cuda else ""
        raise BudgetError(
            f"the reserve of {format_both(reserve_bytes)} leaves nothing of the budget of "
            f"{format_both(budget_bytes)}; give a larger budget or a smaller reserve: "
            f"{reader.no_reserve} leaves all of it to the step{outside}"
        )
    return budget_bytes, reserve_bytes


def parse_size(
    text: str | int | float,
    *,
    capacity_bytes: int | None = None,
    what: str = "budget",
    least_bytes: int = 1,
) -> int:
    """Parse a size into bytes, rounded down.

    text: "16GB" or "16G" (10^9), "15.5GiB" or "15.5Gi" (2^30), "800MB", "123456", 123456,
        0.85 * total_memory, or "60%" of `capacity_bytes`. "16gb" is 16 GB; "16Gb" would be bits
        and is rejected.
    capacity_bytes: the device's memory (None: unknown).
    what: the name of the size in error messages.
    least_bytes: the smallest size allowed.

    Raises BudgetError for an invalid size, one below `least_bytes` or above 2**60 bytes, a
    percentage above 100, and a number between 0 and 1 without a unit, which was probably meant as a
    share. Raises UnknownCapacityError for a percentage of an unknown capacity.
    """
    shown = repr(text) if len(repr(text)) <= 40 else repr(text)[:37] + "..."

    def invalid(reason: str) -> BudgetError:
        return BudgetError(f"invalid {what} {shown}: {reason}")

    try:
        amount, unit = _amount(text)
    except ValueError as error:
        raise invalid(str(error)) from None
    if not unit and 0 < amount < 1:
        right = f"{float(amount):.6g} * its bytes"
        if isinstance(text, str) or capacity_bytes is not None:
            right = f"'{float(100 * amount):.6g}%'"
        if isinstance(text, str) and capacity_bytes is None:
            right += " and name the device: --device h100, or in Python device='h100'"
        raise invalid(f"less than a byte; for a share of the device's memory write {right}")
    if unit == "%" and amount > 100:
        of = "" if capacity_bytes is None else f" ({format_both(capacity_bytes)})"
        raise invalid(f"more than the device has{of}")
    if unit != "%":
        size_bytes = int(amount * _UNITS[unit])
    elif capacity_bytes is None:
        raise UnknownCapacityError(
            f"invalid {what} {shown}: the memory of the device is unknown; name a device "
            "(--device h100, or in Python device='h100'), or give bytes"
        )
    else:
        size_bytes = int(amount * capacity_bytes / 100)
    if size_bytes < least_bytes:
        raise invalid("must be above zero" if least_bytes == 1 else f"at least {least_bytes} bytes")
    if size_bytes > 2**60:
        raise invalid("more than an exbibyte (2**60 bytes)")
    return size_bytes


def _amount(text: object) -> tuple[Fraction, str]:
    """Split a size into its number and unit, a key of _UNITS or "%".

    Raises ValueError with the reason if it is invalid.
    """
    if isinstance(text, Integral) and not isinstance(text, bool):
        return Fraction(int(text)), ""
    if isinstance(text, Real) and not isinstance(text, bool):
        if not math.isfinite(text):
            raise ValueError(f"not a finite number; {_VALID}")
        return Fraction(float(text)), ""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if isinstance(text, str) and text.strip().startswith("-"):
        raise ValueError(f"negative; {_VALID}")
    if match is None:
        raise ValueError(_VALID)
    amount, given = Fraction(match.group(1)), match.group(2)
    if given[:1].isupper() and given.endswith("b"):
        raise ValueError(f"a lower-case b is for bits; write {match.group(1)}{given[:-1]}B")
    unit = given.upper()
    if unit != "%" and unit not in _UNITS:
        raise ValueError(_VALID)
    if not unit and amount > 1 and amount.denominator != 1:
        raise ValueError(f"not a whole number of bytes; {_VALID}")
    return amount, unit


Rates: TypeAlias = str | int | float | Sequence[str | int | float]
"""A link's rate, one for both directions or one for each: "50GB/s", 50e9, "50GB/s,40GB/s",
("50GB/s", "40GB/s")."""

SLOWEST_LINK_BYTES_PER_S = 10**6
"""A rate below this was probably meant in another unit, such as 50 for 50GB/s."""

_RATE = re.compile(r"(.*?)(?:/\s*s)?\s*")


def parse_rate(text: str | int | float, *, what: str) -> float:
    """Parse a rate ("50GB/s", "50GB" or 5e10) into bytes per second.

    what: the name of the rate in error messages.

    Raises BudgetError for an invalid rate, for a lower-case b ("50Gb/s" is 50 gigabits per second),
    and for less than SLOWEST_LINK_BYTES_PER_S.
    """
    size = text
    if isinstance(text, str) and (match := _RATE.fullmatch(text)) is not None:
        size = match.group(1)
        if size.endswith("b"):
            raise BudgetError(
                f"invalid {what} {text!r}: a lower-case b is for bits; write {size[:-1]}B/s for "
                "bytes per second"
            )
    try:
        rate = float(parse_size("" if size == "" or "%" in str(size) else size, what=what))
    except BudgetError as error:
        raise BudgetError(f"invalid {what} {text!r}: write 50GB/s or bytes per second") from error
    if rate < SLOWEST_LINK_BYTES_PER_S:
        raise BudgetError(
            f"invalid {what} {text!r}: {format_size(rate)}/s, and no link is slower than "
            f"{format_size(SLOWEST_LINK_BYTES_PER_S)}/s; write 50GB/s for gigabytes per second"
        )
    return rate


def parse_rates(given: Rates, *, what: str, example: str) -> tuple[float, float]:
    """Parse a link's rates into bytes per second (away from the device, back to it).

    given: one rate for both directions, or two.
    what: the name of the rates in error messages.
    example: two rates written correctly, for error messages.

    Raises BudgetError if a rate is invalid or there are more than two.
    """
    words = given.split(",") if isinstance(given, str) else given
    parts = words if isinstance(words, Sequence) else [words]
    if len(parts) not in (1, 2):
        one = example.partition(",")[0]
        raise BudgetError(f"invalid {what} {given!r}: write {one}, or OUT,IN: {example}")
    rates = [parse_rate(part, what=what) for part in parts]
    return rates[0], rates[-1]


SMALLEST_BARE_BYTES = 10**6
"""A budget in text without a unit that is below this, and too small for the step, was probably
meant in another unit."""


def reject_missing_unit(text: object, *, resident_bytes: int, what: str = "budget") -> None:
    """Raise BudgetError for a budget such as "16" if the resident tensors alone are larger.

    Applies only to text without a unit, below SMALLEST_BARE_BYTES. Numbers are always taken as
    bytes, since programs compute them (1 asks for the least budget).

    what: the name of the budget in the message.
    """
    if not isinstance(text, str) or not text.strip().isascii() or not text.strip().isdigit():
        return
    size_bytes = int(text)
    if size_bytes < min(SMALLEST_BARE_BYTES, resident_bytes):
        raise BudgetError(
            f"invalid {what} {text!r}: {counted(size_bytes, 'byte')}, for a step whose parameters, "
            f"optimizer state and batch take {format_both(resident_bytes)} or more; write "
            f"{size_bytes}GB for gigabytes"
        )


def reject_share(text: object, *, what: str) -> None:
    """Raise BudgetError for a share such as "50%" of host memory or disk, whose size is not known.

    what: the name of the budget in the message.
    """
    if "%" in str(text):
        raise BudgetError(
            f"invalid {what} {text!r}: write 64GB or a number of bytes; only the device's memory "
            "can be given as a share"
        )


_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))


def format_size(size_bytes: int | float) -> str:
    """Format a size in decimal units, three or more digits: "16.00 GB", "812.4 MB", "512 B"."""
    for unit, factor in _DECIMAL:
        if abs(size_bytes) >= factor:
            amount = size_bytes / factor
            return f"{amount:.2f} {unit}" if amount < 100 else f"{amount:.1f} {unit}"
    return f"{int(size_bytes)} B"


def format_size_up(size_bytes: int) -> str:
    """As `format_size`, but rounded up, so that a budget of the printed size is enough."""
    for unit, factor in _DECIMAL:
        if size_bytes >= factor:
            digits = 2 if size_bytes < 100 * factor else 1
            amount = math.ceil(size_bytes * 10**digits / factor) / 10**digits
            return f"{amount:.{digits}f} {unit}"
    return f"{size_bytes} B"


def format_both(size_bytes: int) -> str:
    """Format a size in decimal and binary units: "16.00 GB (14.90 GiB)"; below a KiB in bytes."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{format_size(size_bytes)} ({size_bytes / factor:.2f} {unit})"
    return f"{size_bytes} B"
