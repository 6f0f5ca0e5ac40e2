"""`auto` with copies, followed by the published chain methods if it leaves a gap.

On long chains of equal steps near the minimum budget many positions bind, and a cut sees only one
of them. There the dynamic programs of `storage_levels` find faster schedules. They are not tried if
the gap is closed. The bound is that of `auto`.
"""

from __future__ import annotations

from typing import Any

from graphs.graph import Graph
from solver.methods.auto import auto
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.methods.storage_levels import METHODS_ON_LEVELS, KnownResults
from solver.schedule import OPTIMAL_GAP, Places
from solver.sizes_deadlines_progress import Deadline

CHAIN_METHODS = ("hrevolve", "disk_revolve")
"""Methods tried after `auto`."""
AUTO_SHARE = 0.85
"""Maximum share of the time limit for `auto` if other methods may be tried after it."""


def auto_then_chain_methods(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    places: Places | None = None,
    **options: Any,
) -> Proposal:
    """The best schedule of `auto` and the methods in CHAIN_METHODS.

    options: the other arguments of `solver.methods.auto.auto`.
    """
    deadline = Deadline.after(time_limit_s)
    may_copy = places is not None and places.host is not None and not options.get("quick")
    auto_s = AUTO_SHARE * time_limit_s if may_copy else time_limit_s
    proposal = auto(graph, budget_bytes=budget_bytes, time_limit_s=auto_s, places=places, **options)
    if not may_copy:
        return proposal
    search = BestSoFar(
        graph, budget_bytes=budget_bytes, time_limit_s=deadline.left_s, places=places
    )
    if proposal.schedule is not None:
        search.fits(proposal.schedule)
    known: KnownResults = {}
    for name in CHAIN_METHODS:
        least_s = proposal.lower_bound_s + OPTIMAL_GAP * graph.baseline_time_s
        if search.best is not None and search.best[1].time_s <= least_s:
            break
        found = METHODS_ON_LEVELS[name](
            graph,
            budget_bytes=budget_bytes,
            time_limit_s=deadline.left_s,
            seed=0,
            places=places,
            known=known,
        )
        if found.schedule is not None:
            search.fits(found.schedule)
    best = search.proposal().schedule
    return Proposal(best, proposal.lower_bound_s, proposal.timed_out)
