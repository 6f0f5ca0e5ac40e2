"""The best schedule among all that a method has simulated so far: the fastest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

from graphs.graph import Graph
from solver.methods.proposal import Proposal
from solver.schedule import (
    Places,
    Schedule,
    Simulation,
    copy_layout,
    simulate_if_legal,
)
from solver.sizes_deadlines_progress import Deadline, OutOfTimeError

ANY_TIME = (0.0, math.inf)
"""A `worth_between_s` for which every schedule is worth a simulation."""


class BestSoFar:
    """Simulates schedules for one budget, within one time limit, and keeps the best.

    Of equally fast schedules the one with the smaller peak is kept, then the first. As a context
    manager it catches OutOfTimeError and sets `timed_out`.

    lost_share: time that provably every schedule loses, as a share of the baseline's.
    worth_between_s: a schedule is worth a simulation only if its step takes between these two
        times. The caller has proven that no faster schedule fits, and knows one as fast as the
        second.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        budget_bytes: int,
        time_limit_s: float,
        places: Places | None = None,
        worth_between_s: tuple[float, float] = ANY_TIME,
    ) -> None:
        self.graph = graph
        self.worth_between_s = worth_between_s
        self.places = places
        self.budget_bytes = budget_bytes
        self.deadline = Deadline.after(time_limit_s)
        self.timed_out = False
        self.best: tuple[Schedule, Simulation] | None = None
        self.lost_share = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.timed_out = self.timed_out or kind is OutOfTimeError
        return kind is OutOfTimeError

    def fits(self, schedule: Schedule) -> bool:
        """Simulate the schedule, keep it if it is the best, and return whether it fits.

        An illegal schedule does not fit.
        """
        simulation = simulate_if_legal(self.graph, schedule, places=self.places)
        return simulation is not None and self.keep_if_best(schedule, simulation)

    def may_fit(self, order: Sequence[str]) -> bool:
        """Whether a schedule as fast as this order's may fit, as far as is proven."""
        return self.time_s(order) >= self.worth_between_s[0]

    def try_larger(self, order: Sequence[str], schedule: Callable[[], Schedule]) -> bool:
        """Whether to go on to schedules that need more memory, and are faster, than this order's.

        That is so if its schedule fits, or is too slow to be worth a simulation.
        """
        is_slow = self.time_s(order) > self.worth_between_s[1]
        return self.may_fit(order) and (is_slow or self.fits(schedule()))

    def keep_if_best(self, schedule: Schedule, simulation: Simulation) -> bool:
        """Whether the schedule fits, with its copies laid out in memory; kept if it is the best."""
        places = self.places or Places()
        if simulation.host_peak_bytes - self.graph.host_state_bytes > places.host_bytes:
            return False
        if simulation.disk_peak_bytes > places.disk_bytes:
            return False
        if simulation.peak_bytes > self.budget_bytes:
            return False
        if schedule.has_copies and copy_layout(self.graph, schedule, places).excess(places):
            return False
        rank = simulation.time_s, simulation.peak_bytes
        if self.best is None or rank < (self.best[1].time_s, self.best[1].peak_bytes):
            self.best = schedule, simulation
        return True

    @property
    def best_share(self) -> float:
        """Time that the best schedule loses, as a share of the baseline's; inf if there is none."""
        if self.best is None:
            return math.inf
        baseline_s = self.graph.baseline_time_s
        return (self.best[1].time_s - baseline_s) / baseline_s if baseline_s else 0.0

    @property
    def gap(self) -> float:
        """The best schedule's time less the bound, as a share of the baseline's time."""
        return self.best_share - self.lost_share

    def time_s(self, order: Sequence[str]) -> float:
        """Seconds that running these nodes takes."""
        nodes = self.graph.node_by_name
        return math.fsum(nodes[name].time_s for name in order)

    def is_faster(self, order: Sequence[str]) -> bool:
        """Whether running these nodes would be faster than the best so far."""
        return self.best is None or self.time_s(order) < self.best[1].time_s

    def time_is_up(self) -> bool:
        """Whether the search has to stop; if so, sets `timed_out`."""
        self.timed_out = self.timed_out or self.deadline.passed
        return self.timed_out

    def bisect(
        self, fits: Callable[[int], bool], low: int, high: int, *, tolerance: int = 1
    ) -> tuple[int, int]:
        """Bisect for the largest number that fits. `low` is assumed to fit, `high` not to.

        Returns the last number that fits and the first that does not, at most `tolerance` apart
        unless the time is up.
        """
        while high - low > tolerance and not self.time_is_up():
            middle = (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return low, high

    def proposal(self) -> Proposal:
        return Proposal(schedule=self.best[0] if self.best else None, timed_out=self.timed_out)
