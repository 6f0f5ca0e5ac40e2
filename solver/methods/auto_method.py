"""`auto`: recompute, and copy as well if there is a host.

On long chains of equal steps near the minimum budget many positions bind, and a cut with copies
sees only one of them. There the dynamic programs of `storage_levels`, published chain methods, find
faster schedules. They are tried if a gap is left. The bound is that of the cuts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from graphs.graph import Graph
from solver.methods.auto import recompute_and_copy, recompute_only
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.methods.storage_levels import METHODS_ON_LEVELS, KnownResults
from solver.schedule import OPTIMAL_GAP, Places, Schedule
from solver.sizes_deadlines_progress import Deadline

CHAIN_METHODS = ("hrevolve", "disk_revolve")
"""Methods tried after `recompute_and_copy`."""
COPIES_SHARE = 0.85
"""Share of the time limit for `recompute_and_copy` if other methods may be tried after it."""


def auto(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    seed: int,
    starts: Sequence[Schedule] = (),
    quick: bool = False,
    worth_below_share: float = math.inf,
    places: Places | None = None,
) -> Proposal:
    """The best schedule found and the proven bound. No randomness.

    seed: not used, as in every method without randomness.
    starts: known schedules of this graph, such as those of a smaller budget.
    quick: only the stages that take about a second.
    worth_below_share: schedules that lose this share of the baseline's time or more are of no
        interest. Ignored if there is a host.
    places: host memory and disk to which schedules may copy.
    """
    if places is None or places.host is None:
        return recompute_only(
            graph,
            budget_bytes=budget_bytes,
            time_limit_s=time_limit_s,
            starts=starts,
            quick=quick,
            worth_below_share=worth_below_share,
        )
    deadline = Deadline.after(time_limit_s)
    proposal = recompute_and_copy(
        graph,
        budget_bytes=budget_bytes,
        time_limit_s=time_limit_s if quick else COPIES_SHARE * time_limit_s,
        places=places,
        starts=starts,
        quick=quick,
    )
    if quick:
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
            seed=seed,
            places=places,
            known=known,
        )
        if found.schedule is not None:
            search.fits(found.schedule)
    return dataclasses.replace(proposal, schedule=search.proposal().schedule)
