"""Which share of its peak rates a card reaches, fitted on the published rows.

It is one share for all operators: matrix products take most of each row, so the rows cannot tell
kinds of operators apart. One share scales every time and leaves the overheads of plans as they are,
so plans do not use it.
"""

from collections.abc import Mapping

FITTED: Mapping[str, float] = {"rtx4090": 0.97, "a100": 0.75}
"""Medians of peak-rate time over measured time. rtx4090: ten steps of gated MLPs, 0.92 to 1.02.
a100: one step of a Llama with 3 billion parameters."""


def fitted_share(card: str) -> float | None:
    """By the name of a device (`graphs.hardware`), its memory left out; None: no row is of it."""
    return FITTED.get(card.split("-")[0])
