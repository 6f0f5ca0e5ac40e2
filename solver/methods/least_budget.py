"""The minimum budget for which a schedule is found, between the proven minimum and the baseline.

On deep chains, reversals of the chain of blocks with few snapshots (`solver.methods.revolve`) reach
the lowest peaks. Elsewhere greedy eviction goes further down, by bisection; each schedule found
lowers the upper end to its own peak, often far below the budget that was tried. A method need not
find a schedule for every budget above the least one for which it does, so the result is what was
found, not a proof. On small graphs an exact search (`solver.methods.exact_search`) goes on from
there, and mostly ends with the least budget and its proof.

With several micro-batches in flight, eviction is tried with caps on what the step saves.
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
    proven_least_budget_bytes,
    span_graph,
    whole_span,
    without_span_nodes,
)
from solver.methods.evict import evict
from solver.methods.exact_search import is_small, least_peak
from solver.methods.ilp_variables import TooLargeError
from solver.methods.proposal import Method
from solver.methods.revolve import reversals
from solver.schedule import (
    Obstacle,
    Places,
    Schedule,
    baseline,
    simulate,
    simulate_if_legal,
)
from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError

TOLERANCE = 0.002
"""The search stops when the two ends are within this share of the proven minimum."""
RETRIES = (0.0, 0.9, 0.75, 0.5, 0.9, 0.75, 0.5, 0.25)
"""Budgets tried after the bisection, between the proven (0) and the reached (1) minimum."""
PATIENCE = (1.0, 0.5, 2.0)
"""Exponents of the distance to the next use that eviction tries at other budgets."""
LEAST_PATIENCE = (1.0, 0.5, 0.25, 2.0)
"""Exponents tried for the minimum budget."""
SAVED_SHARES = (0.25, 0.0, 0.5, 0.1, 0.75)
"""The caps that are tried, as shares of what a step can save within a budget."""
OVERTIME_S = 0.5
"""Seconds for the search if the deadline has already passed; else only the baseline is found."""
BASE_WORK, WORK_PER_NODE = 15_000_000, 3_000
"""Limit on the work of all evictions together, as `evict` counts it: five seconds, and 1 ms per
node.
"""


def find_obstacle(
    graph: Graph,
    *,
    method: Method | None = None,
    above_bytes: int = 0,
    seed: int = 0,
    deadline: Deadline = NEVER,
    places: Places | None = None,
) -> Obstacle:
    """The minimum budget, proven and reached, with the schedule and the op that requires it.

    method: the method that has to reach it (None: any).
    above_bytes: reached budgets below this are of no interest.
    deadline: the obstacle is what was proven and found by then, or within OVERTIME_S if it has
        already passed, and is marked as cut short.
    places: where schedules may copy to. Then only what a single op needs is proven, and the reached
        budget is that of schedules without copies.
    """
    folded = requirements = StorageGraph.of(graph)
    places = None if places is None else places.without_state(graph.host_state_bytes)
    if graph.n_in_flight > 1:
        least_bytes = least_in_flight_bytes(folded)
        p = int(np.argmax(least_bytes))
        proven_bytes = int(least_bytes[p])
    elif places is None or places.host is None:
        proven_bytes, p = proven_least_budget_bytes(folded, deadline=deadline)
    else:
        requirements = StorageGraph.of(graph, may_offload=True)
        p = int(np.argmax(requirements.least_bytes))
        proven_bytes = int(requirements.least_bytes[p])
    schedule = None
    if graph.n_in_flight > 1:
        schedule, reached_bytes = _least_in_flight(graph, proven_bytes, deadline=deadline)
    elif method is None or method.reaches_least_budget:
        search_deadline = Deadline.after(OVERTIME_S) if deadline.passed else deadline
        schedule, reached_bytes = least_schedule(
            folded, proven_bytes=proven_bytes, deadline=search_deadline
        )
        if is_small(graph) and (places is None or places.host is None):
            with contextlib.suppress(OutOfTimeError):
                proven_bytes, schedule, reached_bytes = least_peak(
                    folded,
                    proven_bytes=proven_bytes,
                    known=(schedule, reached_bytes),
                    deadline=search_deadline,
                )
    else:

        def schedule_by_method(budget_bytes: int) -> Schedule | None:
            left_s = deadline.left_s
            try:
                proposal = method(graph, budget_bytes=budget_bytes, time_limit_s=left_s, seed=seed)
            except TooLargeError:  # unlike at the budget asked for, where fewer nodes fit twice
                return None
            return proposal.schedule

        _, reached_bytes = _bisect_budget(
            graph,
            schedule_by_method,
            proven_bytes=max(proven_bytes, above_bytes),
            has_work_left=lambda: not deadline.passed,
        )
    # What is on the device at p in every schedule.
    on_device = [
        (folded.unit_names[u], folded.unit_bytes[u])
        for u in range(folded.n_units)
        if requirements.must_be_on_device(u, p) or (p < folded.n_nodes and u in folded.makes[p])
    ]
    on_device += [(t.name, t.size_bytes) for t in graph.resident if t.alias_of is None]
    return Obstacle(
        proven_bytes=proven_bytes,
        reached_bytes=reached_bytes,
        schedule=schedule,
        op=graph.nodes[p].name if p < folded.n_nodes else "",
        on_device=tuple(sorted(on_device, key=lambda item: (-item[1], item[0]))),
        cut_short=deadline.passed,
    )


def least_schedule(
    folded: StorageGraph, *, proven_bytes: int, deadline: Deadline = NEVER
) -> tuple[Schedule, int]:
    """The schedule with the smallest peak that reversals and greedy eviction find, and that peak.

    Reversals of the chain of blocks reach the minimum on deep chains, eviction where skips cross.

    proven_bytes: no schedule has a smaller peak.
    deadline: ends the search, with what was found by then. Without one the answer does not depend
        on the machine's load.
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
    patiences = list(LEAST_PATIENCE)  # the latest that found a schedule comes first

    def find_schedule(budget_bytes: int) -> Schedule | None:
        nonlocal work
        for patience in tuple(patiences):
            if has_work_left():
                schedule, spent = evict(
                    folded, budget_bytes=budget_bytes, patience=patience, deadline=deadline
                )
                work += spent
                if schedule is not None:
                    patiences.remove(patience)
                    patiences.insert(0, patience)
                    return schedule
        return None

    def has_work_left() -> bool:
        return work < max_work and not deadline.passed

    return _bisect_budget(
        graph,
        find_schedule,
        proven_bytes=proven_bytes,
        has_work_left=has_work_left,
        known=(best, least_bytes),
    )


def _least_in_flight(
    graph: Graph, proven_bytes: int, *, deadline: Deadline
) -> tuple[Schedule, int]:
    """`least_schedule` for a step with several micro-batches in flight, by eviction alone."""
    work, max_work = 0, BASE_WORK + WORK_PER_NODE * len(graph.nodes)

    def has_work_left() -> bool:
        return work < max_work and not deadline.passed

    def find_schedule(budget_bytes: int) -> Schedule | None:
        nonlocal work
        whole_savings = whole_span(graph, budget_bytes=budget_bytes)
        for share in SAVED_SHARES if whole_savings.width_bytes >= 0 else ():
            cap_bytes = whole_savings.least_bytes + int(share * whole_savings.width_bytes)
            span = Span(0.0, cap_bytes, cap_bytes)
            capped = StorageGraph.of(span_graph(graph, span, budget_bytes=budget_bytes))
            if not has_work_left():
                break
            schedule, spent = evict(capped, budget_bytes=budget_bytes, deadline=deadline)
            work += spent
            found = _with_peak(
                graph, None if schedule is None else without_span_nodes(graph, schedule)
            )
            if found is not None and found[1] <= budget_bytes:
                return found[0]
        return None

    return _bisect_budget(
        graph, find_schedule, proven_bytes=proven_bytes, has_work_left=has_work_left
    )


def _bisect_budget(
    graph: Graph,
    find_schedule: Callable[[int], Schedule | None],
    *,
    proven_bytes: int,
    has_work_left: Callable[[], bool],
    known: tuple[Schedule, int] | None = None,
) -> tuple[Schedule, int]:
    """Bisect for the schedule with the smallest peak that `find_schedule` finds.

    find_schedule: returns a schedule for a budget, or None.
    has_work_left: whether there is work left.
    known: a schedule and its peak, which are kept if the bisection finds nothing smaller.
    """
    best = baseline(graph)
    high = simulate(graph, best).peak_bytes
    low = proven_bytes  # nothing is found below low, `best` reaches high
    while high - low > TOLERANCE * proven_bytes and has_work_left():
        tried_bytes = (low + high) // 2
        found = _with_peak(graph, find_schedule(tried_bytes))
        if found is None:
            low = tried_bytes + 1
        else:
            best, high = found
    if known is not None and known[1] <= high:
        best, high = known
    # A smaller budget may have a schedule although a larger one had none: try some more.
    for share in RETRIES:
        tried_bytes = proven_bytes + int(share * (high - proven_bytes))
        found = (
            _with_peak(graph, find_schedule(tried_bytes))
            if tried_bytes < high and has_work_left()
            else None
        )
        if found is not None:
            best, high = found
    return best, high


def _with_peak(graph: Graph, schedule: Schedule | None) -> tuple[Schedule, int] | None:
    """The schedule and its peak; None if there is none or the simulator refuses it."""
    if schedule is None or (simulation := simulate_if_legal(graph, schedule)) is None:
        return None
    return schedule, simulation.peak_bytes
