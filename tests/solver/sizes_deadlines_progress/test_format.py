"""Shares, times and counts as people read them."""

from __future__ import annotations

import pytest

from solver.sizes_deadlines_progress.format import counted, format_percent, format_share


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
