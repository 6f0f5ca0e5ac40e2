"""Which share of its peak rates a card reaches, fitted on the published rows.

It is one share for all operators: matrix products take most of each row, so the rows cannot tell
kinds of operators apart. One share scales every time and leaves the overheads of plans as they are,
so plans do not use it. What a row says of the ratio of two shares, that of products and that of
other operators, is the range that reports give for an overhead (`plan_analysis.rate_shares`).
"""

import statistics
from collections.abc import Mapping

FITTED: Mapping[str, float] = {"rtx4090": 0.97, "a100": 0.75}
"""Medians of peak-rate time over measured time. rtx4090: ten steps of gated MLPs, 0.92 to 1.02.
a100: one step of a Llama with 3 billion parameters."""


def ratio_range(
    products_s: float, others_s: float, measured_s: float
) -> tuple[float, float] | None:
    """The least and the largest ratio of the share of products to that of others with which the
    times at peak rates give the measured one, where no share is above 1.

    None: the step was faster than the peak rates.
    """
    if products_s + others_s > measured_s or others_s == 0:
        return None
    return products_s / (measured_s - others_s), (measured_s - products_s) / others_s


def expected_share(card: str) -> float:
    """By the name of a device (`graphs.hardware`), its memory left out; of a card without a row,
    the median of the others."""
    return FITTED.get(card.split("-")[0], statistics.median(FITTED.values()))
