"""The least budget for which a method finds a schedule.

Between the proven floor and the peak without checkpointing by bisection; a schedule that is found
lowers the upper end to its own peak, which is often far below the budget that was tried. A method
need not find a schedule for every budget above the least one that it finds, so this is what was
found, not a proof.
"""

from __future__ import annotations

import time

from graphs.graph import Graph
from solver.methods import METHODS
from solver.rematerialise import baseline
from solver.simulate import simulate

TOLERANCE = 0.01
"""The search stops when the two ends are within this share of the peak without checkpointing."""


def least_peak_bytes(
    graph: Graph, *, proven_bytes: int, method: str, time_limit_s: float, seed: int
) -> int:
    """The smallest peak of a schedule that was found; without any, the one without checkpointing.

    proven_bytes: known not to be beaten, or not to be of interest.
    """
    deadline_s = time.monotonic() + time_limit_s
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    low, high = proven_bytes, peak_bytes  # nothing is found below low, a schedule reaches high
    tried = low  # the floor itself first: with luck it is reached
    while low < high and (left_s := deadline_s - time.monotonic()) > 0:
        proposal = METHODS[method](graph, budget_bytes=tried, time_limit_s=left_s, seed=seed)
        if proposal.schedule is None:
            low = tried + 1
        else:
            high = simulate(graph, proposal.schedule).peak_bytes
        if high - low <= TOLERANCE * peak_bytes:
            break
        tried = (low + high) // 2
    return high
