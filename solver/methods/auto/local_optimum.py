"""Remove recomputation for which there is room after all.

A schedule found by a cut or by greedy eviction recomputes some nodes although there was room to
hold their outputs. Removing the run at position i of an order means holding each output that is
read from there on since its last use before i. The bytes on the device between those two positions
say whether that fits. The most expensive runs are tried first, and runs that only served a removed
one go too. It ends when nothing more can be removed: a local optimum, with nothing proven.

Cost: linear in the order for each pass, and a few passes.
"""

from __future__ import annotations

import numpy as np

from solver.bound import StorageGraph
from solver.methods.auto.runs import Runs, live_bytes
from solver.schedule import (
    Schedule,
    free_after_last_use,
    simulate_if_legal,
    without_dead_computes,
)
from solver.sizes_deadlines_progress import NEVER, Deadline

MAX_PASSES = 20


def drop_recomputation(
    folded: StorageGraph, schedule: Schedule, *, budget_bytes: int, deadline: Deadline = NEVER
) -> Schedule:
    """Remove recomputation from a schedule while it stays within the budget.

    The result is at most as slow, and within the budget if the given schedule is. An illegal
    schedule is returned unchanged. When the deadline passes, the result so far is returned.
    """
    for _ in range(MAX_PASSES):
        if deadline.passed:
            return schedule
        shorter = _one_pass(folded, schedule, budget_bytes, deadline)
        if shorter is None:
            return schedule
        schedule = shorter
    return schedule


def _one_pass(
    folded: StorageGraph, schedule: Schedule, budget_bytes: int, deadline: Deadline
) -> Schedule | None:
    """Remove all runs that fit, one after the other; None: none, or the deadline has passed."""
    graph = folded.graph
    simulation = simulate_if_legal(graph, schedule)
    if simulation is None:
        return None
    order = schedule.order
    live = live_bytes(schedule, simulation)
    runs = Runs(folded, order)
    removed: set[int] = set()
    for i in sorted(runs.repeats, key=lambda i: (-graph.node_by_name[order[i]].time_s, i)):
        if deadline.passed:
            return None
        held_instead = runs.to_hold_instead_of(i)
        if held_instead is None:
            continue
        # Holding the outputs adds their bytes from their last use before i up to i.
        first = min((start for _, start in held_instead), default=i)
        added_bytes = np.zeros(i - first, dtype=np.int64)
        for u, start in held_instead:
            added_bytes[start - first :] += folded.unit_bytes[u]
        if len(added_bytes) and int((live[first:i] + added_bytes).max()) > budget_bytes:
            continue
        live[first:i] += added_bytes
        removed.add(i)
        runs.remove_run(i)
    if not removed or deadline.passed:
        return None
    remaining = [name for i, name in enumerate(order) if i not in removed]
    shorter = free_after_last_use(graph, without_dead_computes(graph, remaining))
    found = simulate_if_legal(graph, shorter)
    return shorter if found is not None and found.peak_bytes <= budget_bytes else None
