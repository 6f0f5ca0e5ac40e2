"""The share of its peak rates that a card reaches, fitted on the published rows.

One share is fitted for all operators. Matrix products take most of the time of each row, and other
operators about the same part of it in every row, so that the rows cannot tell apart a share for
products and one for other operators (`fit_two_shares`). One share scales all times alike and does
not change the overheads of plans, so plans do not use it. But each row bounds the ratio of the two
shares, from which reports derive a range for an overhead (`plan_analysis.rate_shares`).
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

FITTED: Mapping[str, float] = {"rtx4090": 0.97, "a100": 0.75}
"""Card -> median of (time at peak rates / measured time). rtx4090: ten steps of gated MLPs, between
0.92 and 1.02. a100: one step of a Llama with 3 billion parameters."""


def ratio_range(
    products_s: float, others_s: float, measured_s: float
) -> tuple[float, float] | None:
    """Bounds on (share of the peak rates that products reach / share that other operators reach):
    the least and the largest ratio that explains the measured time with no share above 1.

    products_s, others_s: times of products and of other operators at peak rates.

    None if the step was faster than at peak rates or had no other operators.
    """
    if products_s + others_s > measured_s or others_s == 0:
        return None
    return products_s / (measured_s - others_s), (measured_s - products_s) / others_s


def expected_share(card: str) -> float:
    """The fitted share of a card; the median of all for a card without rows.

    card: name of the device in `graphs.hardware`; a suffix with its memory is ignored.
    """
    return FITTED.get(card.split("-")[0], statistics.median(FITTED.values()))


@dataclass(frozen=True)
class TwoShares:
    """A least-squares fit of measured times, by their relative errors: the time of products at peak
    rates times one factor, plus that of other operators times another.

    condition: condition number of the problem.
    factors, spreads: the factors for products and for others, and their standard deviations.
    shares: the best shares (1 / factor) that are at most 1.
    errors: relative error of each row, predicted by shares fitted on the other rows.
    """

    condition: float
    factors: tuple[float, float]
    spreads: tuple[float, float]
    shares: tuple[float, float]
    errors: tuple[float, ...]


def fit_two_shares(rows: Sequence[tuple[float, float, float]]) -> TwoShares:
    """Fit two shares.

    rows: (time of products, time of other operators, both at peak rates, measured time); four or
        more.
    """
    relative = np.array([(products / time, others / time) for products, others, time in rows])
    ones = np.ones(len(rows))
    factors, *_, singular = np.linalg.lstsq(relative, ones)
    variance = float(((relative @ factors - ones) ** 2).sum()) / (len(rows) - 2)
    spreads = np.sqrt(variance * np.diag(np.linalg.inv(relative.T @ relative)))

    def bounded(chosen: np.ndarray) -> np.ndarray:
        """The best factors for these rows that are at least 1 (shares of at most 1)."""
        found = lsq_linear(relative[chosen], ones[chosen], bounds=(1.0, np.inf))
        return np.asarray(found.x)

    all_rows = np.arange(len(rows))
    factors_at_least_1 = bounded(all_rows)
    # leave one out: each row by the factors of all other rows
    errors = [
        abs(float(relative[index] @ bounded(all_rows[all_rows != index])) - 1.0)
        for index in all_rows
    ]
    return TwoShares(
        condition=float(singular[0] / singular[-1]),
        factors=(float(factors[0]), float(factors[1])),
        spreads=(float(spreads[0]), float(spreads[1])),
        shares=(1.0 / float(factors_at_least_1[0]), 1.0 / float(factors_at_least_1[1])),
        errors=tuple(errors),
    )
