"""`auto`: recompute, or copy as well where there is a host."""

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

    seed: not used, as for every method without randomness.
    starts: schedules known for this graph, such as those of a smaller budget.
    quick: only the stages that take about a second.
    worth_below_share: of the baseline's time: no schedule that loses as much is wanted. Without a
        place only.
    places: host memory and disk that schedules may copy to.
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
