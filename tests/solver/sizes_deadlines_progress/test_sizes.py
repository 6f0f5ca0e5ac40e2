"""Sizes as people write them."""

from __future__ import annotations

import numpy as np
import pytest

from solver.sizes_deadlines_progress.sizes import (
    BudgetError,
    format_both,
    format_size,
    format_size_up,
    parse_budget,
    parse_size,
    reject_missing_unit,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("16GB", 16 * 10**9),
        ("15.5GiB", 16_642_998_272),
        ("800MB", 800 * 10**6),
        ("1TB", 10**12),
        ("1e9", 10**9),
        ("1 TiB", 2**40),
        ("3kb", 3000),
        (" .5GB ", 500_000_000),
        ("5.", 5),
        ("16G", 16 * 10**9),
        ("16g", 16 * 10**9),
        ("16 gb", 16 * 10**9),
        ("16Gi", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("800M", 800 * 10**6),
        ("2k", 2000),
        ("1T", 10**12),
        ("123456", 123456),
        (123456, 123456),
        (123456.9, 123456),  # rounded down, as every budget
        (0.85 * 16_910_188_544, 14_373_660_262),
        (np.float64(1e9), 10**9),
        (np.float32(2.5e6), 2_500_000),
        (np.int64(7), 7),
        (1.5, 1),
        ("512B", 512),
        ("0.3333333333GB", 333_333_333),  # rounded down
        ("1.9B", 1),
    ],
)
def test_what_people_write(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lots", "invalid budget"),
        ("", "invalid budget"),
        ("GB", "invalid budget"),
        ("16XB", "invalid budget"),
        ("16GBs", "invalid budget"),
        ("1e9GB", "write 16GB"),
        ("1e", "write 16GB"),
        ("0x10", "invalid budget"),
        ("inf", "invalid budget"),
        ("nan", "invalid budget"),
        ("1.2.3GB", "invalid budget"),
        ("1,5GB", "invalid budget"),
        ("٣GB", "invalid budget"),  # a digit to Python, not to a person reading the report
        ("9" * 5000, "invalid budget"),
        (True, "write 16GB"),
        ("1.5", "not a whole number of bytes; write 16GB"),
        (np.True_, "invalid budget"),
        (complex(1e9), "invalid budget"),
        (float("nan"), "nan: not a finite number; write 16GB"),
        (float("inf"), "inf: not a finite number; write 16GB"),
        (-float("inf"), "-inf: not a finite number"),
        (-0.5e9, "must be above zero"),
        (0.0, "must be above zero"),
        (0.85, r"less than a byte; for a share of the device's memory write 0.85 \* its bytes"),
        ("0.85", r"for a share of the device's memory write '85%' and name the device: --device h"),
        (None, "write 16GB"),
        ("-5GB", ": negative"),
        (-5, "must be above zero"),
        ("0", "must be above zero"),
        (0, "must be above zero"),
        ("0.0000000001GB", "must be above zero"),
        ("2000000TB", "more than an exbibyte"),
        ("60%", "is unknown"),
        ("16Gb", "'16Gb': a lower-case b is for bits; write 16GB"),
        ("1.5 Gib", "write 1.5GiB"),
    ],
)
def test_what_is_no_budget(text, reason):
    with pytest.raises(BudgetError, match=reason) as raised:
        parse_size(text)
    assert len(str(raised.value)) < 200  # one line, whatever was given
    assert "\n" not in str(raised.value)


def test_the_message_names_what_was_given_and_what_would_be_right():
    with pytest.raises(BudgetError, match=r"invalid reserve '5XB': write 16GB, 15\.5GiB"):
        parse_size("5XB", what="reserve")


def test_a_share_of_the_devices_memory():
    assert parse_size("60%", capacity_bytes=80 * 10**9) == 48 * 10**9
    assert parse_size("33.3%", capacity_bytes=1000) == 333
    assert parse_size("100%", capacity_bytes=7) == 7
    with pytest.raises(BudgetError, match=r"more than the device has \(80.00 GB"):
        parse_size("101%", capacity_bytes=80 * 10**9)
    with pytest.raises(BudgetError, match=r"more than the device has$"):
        parse_size("101%")
    with pytest.raises(BudgetError, match="above zero"):
        parse_size("0%", capacity_bytes=80 * 10**9)


@pytest.mark.parametrize("given", ["16", "999999"])
def test_a_unit_that_was_forgotten(given):
    with pytest.raises(BudgetError, match=r"write \d+GB for gigabytes"):
        reject_missing_unit(given, resident_bytes=10**6)
    reject_missing_unit(given, resident_bytes=10)


@pytest.mark.parametrize("given", [1, 16, 16.0, 10**5, "1000000", "16B"])
def test_a_number_of_bytes(given):
    reject_missing_unit(given, resident_bytes=10**9)


def test_a_share_written_as_a_number_is_told_what_is_right():
    with pytest.raises(BudgetError, match=r"invalid reserve 0\.05: .* write '5%'$"):
        parse_size(0.05, capacity_bytes=80 * 10**9, what="reserve", least_bytes=0)
    assert parse_size("5%", capacity_bytes=80 * 10**9) == 4 * 10**9


def test_a_reserve_may_be_zero():
    assert parse_size("0", least_bytes=0) == 0
    assert parse_size("0GB", least_bytes=0) == 0
    assert parse_size(0.0, least_bytes=0) == 0


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (812_400_000, "812.4 MB"),
        (16 * 10**9, "16.00 GB"),
        (10**12, "1.00 TB"),
    ],
)
def test_sizes_are_shown_with_three_figures(size_bytes, text):
    assert format_size(size_bytes) == text


def test_sizes_are_echoed_in_both_units():
    assert format_both(16 * 10**9) == "16.00 GB (14.90 GiB)"
    assert format_both(2**30) == "1.07 GB (1.00 GiB)"
    assert format_both(1000) == "1000 B"
    assert format_both(2048) == "2.05 KB (2.00 KiB)"


@pytest.mark.parametrize("size_bytes", [1, 999, 1_001, 12_651_136, 103_900_000, 10**12 - 1])
def test_a_budget_of_what_is_rounded_up_is_enough(size_bytes: int) -> None:
    assert size_bytes <= parse_size(format_size_up(size_bytes)) <= 1.01 * size_bytes + 1


@pytest.mark.parametrize("on_cuda", [False, True])
def test_only_cuda_has_a_context(on_cuda: bool) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget("1GB", "1GB", on_cuda=on_cuda)
    assert ("CUDA context" in str(caught.value)) == on_cuda
