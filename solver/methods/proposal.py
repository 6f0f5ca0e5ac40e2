"""The interface of a method, and the proposal that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from solver.schedule import Places, Schedule


@dataclass(frozen=True)
class Proposal:
    """A schedule and a bound, before simulation.

    schedule: None if the method found nothing that fits.
    lower_bound_s: no schedule of this graph within the budget is faster, in the units of
        `Node.time_s` (0: nothing proven; inf: proven that nothing fits).
    timed_out: the time limit or Ctrl-C ended the search, so more time might find more.
    """

    schedule: Schedule | None
    lower_bound_s: float = 0.0
    timed_out: bool = False


@dataclass(frozen=True)
class Method:
    """A way to find a schedule, and what callers may rely on.

    propose: the function that `__call__` calls; it gets `starts` and `quick` only if takes_starts,
        and `places` only if there are any.
    proves_bound: its lower bound is at least as strong as `solver.bound.lower_bound_s`.
    takes_starts: it can begin from known schedules of the graph, whether they fit or not, and has a
        quick mode.
    reaches_least_budget: it finds a schedule for the minimum budget that `find_obstacle` reaches.
    op_by_op: it decides op by op what is recomputed, not block by block.
    takes_places: its schedules may copy to the given places. Other methods accept no places.
    needs_places: it is made for steps with places; without any it does what `revolve` does.
    refine: finds a faster schedule from a known one, for a step without places and with one
        micro-batch in flight; called like `solver.methods.auto.refine`.
    prove_more: spends minutes on a sharper bound, for a step without places and with one
        micro-batch in flight; called like `solver.methods.auto.prove_more`.
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

        The same input and seed give the same answer, unless `time_limit_s` ends the search.

        starts: known schedules of the graph; ignored unless takes_starts.
        quick: do a fraction of the work, for one of many budgets or sizes; ignored unless
            takes_starts.
        places: where the schedule may copy to. Its copies fit there, beside any optimizer state
            kept there.

        Raises ValueError if places are given and the method takes none.
        """
        if places is not None:
            places = places.without_state(graph.host_state_bytes)
        common_options = {"budget_bytes": budget_bytes, "time_limit_s": time_limit_s, "seed": seed}
        options = {"starts": starts, "quick": quick} if self.takes_starts else {}
        if places is not None and not self.takes_places:
            raise ValueError("a host is given, and this method copies nothing to it")
        places_option = {} if places is None else {"places": places}
        return self.propose(graph, **common_options, **options, **places_option)
