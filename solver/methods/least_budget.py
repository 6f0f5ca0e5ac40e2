"""The least budget for which a schedule is found, between what is proven and no checkpointing.

Reversals of the chain of blocks with few snapshots (`solver.methods.dp`) reach it on deep
chains. Elsewhere greedy eviction goes further down, by bisection; a schedule that is found lowers
the upper end to its own peak, often far below the budget that was tried. A method need not find a
schedule for every budget above the least one for which it does, so this is what was found, not a
proof.

With several micro-batches in flight the eviction is tried with caps on what the step saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from graphs.graph import Graph
from solver.bound import (
    Span,
    StorageGraph,
    least_in_flight_bytes,
    of_step,
    proven_least_budget_bytes,
    span_graph,
    whole_span,
)
from solver.methods.evict import evict
from solver.methods.proposal import Method
from solver.methods.revolve import reversals
from solver.schedule import (
    IllegalScheduleError,
    Obstacle,
    Places,
    Schedule,
    baseline,
    simulate,
)
from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError

TOLERANCE = 0.002
"""The search stops when the two ends are within this share of what is proven."""
RETRIES = (0.0, 0.9, 0.75, 0.5, 0.9, 0.75, 0.5, 0.25)
"""Between what is proven and what is reached, after the bisection."""
PATIENCE = (1.0, 0.5, 2.0)
"""Exponents of the distance to the next use that the eviction tries."""
LEAST_PATIENCE = (1.0, 0.5, 0.25, 2.0)
"""Those tried for the least budget."""
SAVED_SHARES = (0.25, 0.0, 0.5, 0.1, 0.75)
"""Of what a step can save within a budget: the caps that are tried."""
LATE_S = 0.5
"""For the search where the deadline has passed before it: else it would find the plain step."""
BASE_WORK, WORK_PER_NODE = 15_000_000, 3_000
"""Of all evictions together, as `evict` counts it: five seconds, and 1 ms for a node."""


def find_obstacle(
    graph: Graph,
    *,
    method: Method | None = None,
    above_bytes: int = 0,
    seed: int = 0,
    deadline: Deadline = NEVER,
    places: Places | None = None,
) -> Obstacle:
    """The least budget, proven and reached, with the schedule and the op that asks for it.

    method: the one that has to reach it (None: whatever does).
    above_bytes: the reached budget is only of interest above these.
    deadline: the obstacle is what was proven and found by then, or within LATE_S where that has
        passed, and says that it was cut short.
    places: what schedules may copy to; then only what one op itself needs is proven, and what is
        reached is reached without copies.
    """
    folded = needed = StorageGraph.of(graph)
    places = None if places is None else places.beside(graph.host_state_bytes)
    if graph.n_in_flight > 1:
        least_bytes = least_in_flight_bytes(folded)
        p = int(np.argmax(least_bytes))
        proven_bytes = int(least_bytes[p])
    elif places is None or places.host is None:
        proven_bytes, p = proven_least_budget_bytes(folded, deadline=deadline)
    else:
        needed = StorageGraph.of(graph, may_leave=True)
        p = int(np.argmax(needed.least_bytes))
        proven_bytes = int(needed.least_bytes[p])
    schedule = None
    if graph.n_in_flight > 1:
        schedule, reached_bytes = _least_in_flight(graph, proven_bytes, deadline=deadline)
    elif method is None or method.reaches_least_budget:
        search_by = Deadline.after(LATE_S) if deadline.passed else deadline
        schedule, reached_bytes = least_schedule(
            folded, proven_bytes=proven_bytes, deadline=search_by
        )
    else:

        def by_method(budget_bytes: int) -> Schedule | None:
            left_s = deadline.left_s
            return method(graph, budget_bytes=budget_bytes, time_limit_s=left_s, seed=seed).schedule

        _, reached_bytes = _search_down(
            graph,
            by_method,
            proven_bytes=max(proven_bytes, above_bytes),
            more=lambda: not deadline.passed,
        )
    here = [
        (folded.unit_names[u], folded.unit_bytes[u])
        for u in range(folded.n_units)
        if needed.must_be_there(u, p) or (p < folded.n_nodes and u in folded.makes[p])
    ]
    here += [(t.name, t.size_bytes) for t in graph.resident if t.alias_of is None]
    return Obstacle(
        proven_bytes=proven_bytes,
        reached_bytes=reached_bytes,
        schedule=schedule,
        op=graph.nodes[p].name if p < folded.n_nodes else "",
        on_device=tuple(sorted(here, key=lambda item: (-item[1], item[0]))),
        cut_short=deadline.passed,
    )


def least_schedule(
    folded: StorageGraph, *, proven_bytes: int, deadline: Deadline = NEVER
) -> tuple[Schedule, int]:
    """The schedule of the smallest peak that reversals and greedy eviction find, and that peak.

    Reversals of the chain of blocks reach the least on deep chains, eviction where skips cross.
    proven_bytes: known not to be beaten. deadline: what was found by then counts; without it the
    answer is the same whatever the machine's load.
    """
    graph = folded.graph
    best = baseline(graph)
    least_bytes = simulate(graph, best).peak_bytes
    with contextlib.suppress(OutOfTimeError):
        for schedule in reversals(graph, deadline=deadline):
            deadline.check()
            found = _with_peak(graph, schedule)
            if found is not None and found[1] < least_bytes:
                best, least_bytes = found
    if least_bytes - proven_bytes <= TOLERANCE * proven_bytes or deadline.passed:
        return best, least_bytes
    work, max_work = 0, BASE_WORK + WORK_PER_NODE * folded.n_nodes
    patiences = list(LEAST_PATIENCE)  # the one that found something last comes first

    def attempt(budget_bytes: int) -> Schedule | None:
        nonlocal work
        for patience in tuple(patiences):
            if more():
                schedule, spent = evict(
                    folded, budget_bytes=budget_bytes, patience=patience, deadline=deadline
                )
                work += spent
                if schedule is not None:
                    patiences.remove(patience)
                    patiences.insert(0, patience)
                    return schedule
        return None

    def more() -> bool:
        return work < max_work and not deadline.passed

    return _search_down(
        graph, attempt, proven_bytes=proven_bytes, more=more, known=(best, least_bytes)
    )


def _least_in_flight(
    graph: Graph, proven_bytes: int, *, deadline: Deadline
) -> tuple[Schedule, int]:
    """`least_schedule` of a step with several micro-batches in flight, by eviction alone."""
    work, max_work = 0, BASE_WORK + WORK_PER_NODE * len(graph.nodes)

    def more() -> bool:
        return work < max_work and not deadline.passed

    def attempt(budget_bytes: int) -> Schedule | None:
        nonlocal work
        whole = whole_span(graph, budget_bytes=budget_bytes)
        for share in SAVED_SHARES if whole.width_bytes >= 0 else ():
            cap_bytes = whole.least_bytes + int(share * whole.width_bytes)
            span = Span(0.0, cap_bytes, cap_bytes)
            alone = StorageGraph.of(span_graph(graph, span, budget_bytes=budget_bytes))
            if not more():
                break
            schedule, spent = evict(alone, budget_bytes=budget_bytes, deadline=deadline)
            work += spent
            found = _with_peak(graph, None if schedule is None else of_step(graph, schedule))
            if found is not None and found[1] <= budget_bytes:
                return found[0]
        return None

    return _search_down(graph, attempt, proven_bytes=proven_bytes, more=more)


def _search_down(
    graph: Graph,
    attempt: Callable[[int], Schedule | None],
    *,
    proven_bytes: int,
    more: Callable[[], bool],
    known: tuple[Schedule, int] | None = None,
) -> tuple[Schedule, int]:
    """The schedule of the smallest peak that attempts at smaller and smaller budgets meet."""
    best = baseline(graph)
    high = simulate(graph, best).peak_bytes
    low = proven_bytes  # nothing is found below low, `best` reaches high
    while high - low > TOLERANCE * proven_bytes and more():
        tried = (low + high) // 2
        found = _with_peak(graph, attempt(tried))
        if found is None:
            low = tried + 1
        else:
            best, high = found
    if known is not None and known[1] <= high:
        best, high = known
    # Below a budget without a schedule there may be one with: try further down once more.
    for share in RETRIES:
        tried = proven_bytes + int(share * (high - proven_bytes))
        found = _with_peak(graph, attempt(tried)) if tried < high and more() else None
        if found is not None:
            best, high = found
    return best, high


def _with_peak(graph: Graph, schedule: Schedule | None) -> tuple[Schedule, int] | None:
    """The schedule and its peak; None for none and for one that the simulator refuses."""
    try:
        return None if schedule is None else (schedule, simulate(graph, schedule).peak_bytes)
    except IllegalScheduleError:
        return None
