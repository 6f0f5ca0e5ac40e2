"""Which share of its peak rates a card reaches, fitted on the published rows.

It is one share for all operators: matrix products take most of each row, and the other operators
nearly the same part of each, so the rows cannot tell kinds of operators apart (`two_shares`). One
share scales every time and leaves the overheads of plans as they are, so plans do not use it. What
a row says of the ratio of two shares, that of products and that of other operators, is the range
that reports give for an overhead (`plan_analysis.rate_shares`).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

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


@dataclass(frozen=True)
class TwoShares:
    """Measured times as the sum of those of products and of other operators at peak rates, each
    times a factor, by least squares of the relative errors.

    condition: number of the problem. factors, spreads: of products and of others, with the standard
    deviations. shares: the best that are at most 1. errors: of each row by the other rows' shares.
    """

    condition: float
    factors: tuple[float, float]
    spreads: tuple[float, float]
    shares: tuple[float, float]
    errors: tuple[float, ...]


def two_shares(rows: Sequence[tuple[float, float, float]]) -> TwoShares:
    """rows: of products and of others at peak rates, and as measured; four or more of them."""
    relative = np.array([(products / time, others / time) for products, others, time in rows])
    ones = np.ones(len(rows))
    factors, *_, singular = np.linalg.lstsq(relative, ones)
    variance = float(((relative @ factors - ones) ** 2).sum()) / (len(rows) - 2)
    spreads = np.sqrt(variance * np.diag(np.linalg.inv(relative.T @ relative)))

    def bounded(chosen: np.ndarray) -> np.ndarray:
        found = lsq_linear(relative[chosen], ones[chosen], bounds=(1.0, np.inf))
        return np.asarray(found.x)

    every = np.arange(len(rows))
    slower = bounded(every)
    errors = [abs(float(relative[at] @ bounded(every[every != at])) - 1.0) for at in every]
    return TwoShares(
        condition=float(singular[0] / singular[-1]),
        factors=(float(factors[0]), float(factors[1])),
        spreads=(float(spreads[0]), float(spreads[1])),
        shares=(1.0 / float(slower[0]), 1.0 / float(slower[1])),
        errors=tuple(errors),
    )
