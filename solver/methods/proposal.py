"""What a method hands to the judge: a schedule, or none, and a lower bound if it proved one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graphs.graph import Graph
from solver.schedule import Schedule


@dataclass(frozen=True)
class Proposal:
    """schedule: None when the method found nothing that fits.

    lower_bound_s: no schedule of this graph within the budget is faster, on the clock of
    `Node.time_s` (0: nothing proven; inf: proven that nothing fits). timed_out: the time limit
    ended the search, so more time might find more.
    """

    schedule: Schedule | None
    lower_bound_s: float = 0.0
    timed_out: bool = False


class InterruptedSearchError(KeyboardInterrupt):
    """Ctrl-C ended a search that can still say what was best; to all others a KeyboardInterrupt."""

    def __init__(self, proposal: Proposal) -> None:
        super().__init__("the search was interrupted")
        self.proposal = proposal


class Method(Protocol):
    """Finds a schedule whose peak, by the judge, is at most `budget_bytes`.

    `time_limit_s` bounds the search, not the run time of the schedule. Same input and seed, same
    answer. A method that finds nothing returns Proposal(None); it never returns one that it knows
    not to fit.
    """

    def __call__(
        self, graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int
    ) -> Proposal: ...


class WarmMethod(Protocol):
    """A method that can begin from schedules known for the graph, whether they fit or not."""

    def __call__(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        time_limit_s: float,
        seed: int,
        starts: Sequence[Schedule] = (),
    ) -> Proposal: ...
