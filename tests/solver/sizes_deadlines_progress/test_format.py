"""Shares, times and counts as people read them."""

from __future__ import annotations

import pytest

from solver.sizes_deadlines_progress.format import (
    counted,
    format_percent,
    format_share,
    format_time,
)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, ""),
        (0.0, "+0.00 %"),
        (0.04731, "+4.73 %"),
        (-0.01, "-1.00 %"),
        (9.99, "+999.00 %"),
        (10.0, "11 x as long"),
        (3525.008, "3,526 x as long"),
    ],
)
def test_an_overhead(share: float | None, text: str) -> None:
    assert format_share(share) == text


def test_parts_and_counts() -> None:
    assert format_percent(0.12345) == "12.35 %"
    assert format_percent(0.12345, digits=1) == "12.3 %"
    assert [counted(n, "op") for n in (0, 1, 2)] == ["0 ops", "1 op", "2 ops"]
    assert [counted(n, "try", "tries") for n in (1, 2)] == ["1 try", "2 tries"]


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "0 s"),
        (1.234, "1.23 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
        (0.0456, "45.6 ms"),
        (7.89e-4, "789 us"),
        (5e-8, "50.0 ns"),
        (1e-12, "1.0e-12 s"),
    ],
)
def test_times_have_three_figures(time_s, text):
    assert format_time(time_s) == text
