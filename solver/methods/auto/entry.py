"""`auto`: recompute, and copy as well if there is a host."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphs.graph import Graph
from solver.methods.auto.stages import recompute_only
from solver.methods.auto.with_copies import with_copies
from solver.methods.proposal import Proposal
from solver.schedule import Places, Schedule


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
    """The best schedule found and the proven bound (`stages`, `with_copies`). No randomness.

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
    return with_copies(
        graph,
        budget_bytes=budget_bytes,
        time_limit_s=time_limit_s,
        places=places,
        starts=starts,
        quick=quick,
    )
