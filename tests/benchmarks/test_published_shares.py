"""Times that others measured, and the shares of a card's rates that they tell."""

from __future__ import annotations

import functools
import statistics

import pytest

from benchmarks.published.__main__ import compare_rows
from benchmarks.published.shares import FITTED, expected_share, fit_two_shares, ratio_range
from benchmarks.published.tables import leave_one_out_errors
from solver.plan_analysis import LARGEST_RATIO, LEAST_RATIO
from tests.benchmarks.test_published import ROWS


@functools.cache
def tiled_results():
    return compare_rows(row for row in ROWS if row["op"].startswith("tiled"))


@pytest.mark.slow
def test_times_are_predicted_and_the_fitted_share_is_their_median():
    results = tiled_results()
    errors = [abs(result["off"]) for result in results]
    assert len(errors) == 10
    assert max(errors) < 0.1
    shares = [result["rate_share"] for result in results]
    assert statistics.median(shares) == pytest.approx(FITTED["rtx4090"], abs=0.005)


def test_a_card_without_a_row_is_expected_between_the_others():
    assert expected_share("rtx4090") == FITTED["rtx4090"]
    assert expected_share("a100-40gb") == FITTED["a100"]
    assert min(FITTED.values()) < expected_share("l40s") < max(FITTED.values())


def test_a_share_is_tried_on_a_row_that_it_was_not_fitted_on():
    assert leave_one_out_errors([0.5, 1.0]) == [0.5, 1.0]
    assert leave_one_out_errors([0.8, 1.0, 0.8]) == pytest.approx([1 / 9, 0.25, 1 / 9])


def test_two_shares_are_found_where_the_rows_tell_them_apart():
    rows = [
        (products, others, products / 0.8 + others / 0.5)
        for products, others in ((3, 1), (1, 3), (2, 2), (5, 1))
    ]
    found = fit_two_shares(rows)
    assert found.shares == pytest.approx((0.8, 0.5))
    assert found.factors == pytest.approx((1 / 0.8, 1 / 0.5))
    assert max(*found.errors, *found.spreads) < 1e-6
    alike = [(10 * t, 2.0 * t, 12.0 * t * off) for t, off in ((1, 1), (2, 1.03), (3, 0.98), (4, 1))]
    alike[0] = (10.1, 1.9, 12.0)
    assert fit_two_shares(alike).condition > 30
    assert fit_two_shares(alike).spreads[1] > 0.5


def test_the_ratio_of_two_shares_gives_the_measured_time():
    """At both ends one share is 1, and the other one gives the rest of the measured time."""
    least, largest = ratio_range(6.0, 2.0, 10.0)
    assert 6.0 / least + 2.0 == pytest.approx(10.0)
    assert 6.0 + 2.0 * largest == pytest.approx(10.0)
    assert ratio_range(6.0, 5.0, 10.0) is None


@pytest.mark.slow
def test_times_of_modules_leave_no_wider_range():
    ratios = [result["ratio"] for result in tiled_results() if result["ratio"] is not None]
    assert len(ratios) > 5
    assert all(LEAST_RATIO < low < high < LARGEST_RATIO for low, high in ratios)
