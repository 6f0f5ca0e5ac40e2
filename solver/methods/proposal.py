"""What a method is, and what it hands to the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from solver.schedule import Places, Schedule


@dataclass(frozen=True)
class Proposal:
    """schedule: None when the method found nothing that fits.

    lower_bound_s: no schedule of this graph within the budget is faster, on the clock of
    `Node.time_s` (0: nothing proven; inf: proven that nothing fits).
    timed_out: the time limit or Ctrl-C ended the search, so more time might find more.
    """

    schedule: Schedule | None
    lower_bound_s: float = 0.0
    timed_out: bool = False


@dataclass(frozen=True)
class Method:
    """A way to find a schedule, and what callers may rely on.

    propose: called as the method itself, with `starts` only if it takes them.
    proves_bound: its lower bound is at least as strong as `solver.bound.lower_bound_s`.
    takes_starts: it can begin from schedules known for the graph, whether they fit or not, and be
    quick.
    reaches_least_budget: it finds a schedule for the least budget that `find_obstacle` reaches.
    op_by_op: it decides op by op what is recomputed, not block by block.
    takes_places: its schedules may copy to the places that are given; no other method is given any.
    needs_places: it is for steps with places; without any it does what `revolve` does.
    refine: a faster schedule from one that is known, for a step without places and with one
    micro-batch in flight; called as `solver.methods.auto.refine` is.
    prove_more: minutes of work for a sharper bound, for a step without places and with one
    micro-batch in flight; called as `solver.methods.auto.prove_more` is.
    """

    propose: Callable[..., Proposal]
    proves_bound: bool = False
    takes_starts: bool = False
    reaches_least_budget: bool = False
    op_by_op: bool = False
    takes_places: bool = False
    needs_places: bool = False
    refine: Callable[..., Proposal] | None = None
    prove_more: Callable[..., Proposal] | None = None

    def __call__(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        time_limit_s: float,
        seed: int,
        starts: Sequence[Schedule] = (),
        quick: bool = False,
        places: Places | None = None,
    ) -> Proposal:
        """A schedule whose peak, by the simulator, is at most `budget_bytes`, or Proposal(None).

        Same input and seed, same answer, unless `time_limit_s` ends the search.

        quick: with a fraction of the work, for one of many budgets or sizes.
        places: what the schedule may copy to; its copies fit there, beside the optimizer's state if
        it is there.
        """
        if places is not None:
            places = places.beside(graph.host_state_bytes)
        common = {"budget_bytes": budget_bytes, "time_limit_s": time_limit_s, "seed": seed}
        options = {"starts": starts, "quick": quick} if self.takes_starts else {}
        if places is not None and not self.takes_places:
            raise ValueError("a host is given, and this method copies nothing to it")
        beside = {} if places is None else {"places": places}
        return self.propose(graph, **common, **options, **beside)
