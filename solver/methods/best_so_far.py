"""A method's memory of its search: of all schedules judged so far, the fastest that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from graphs.graph import Graph
from solver.common import KEPT_SHARE, Deadline, OutOfTimeError
from solver.methods.proposal import InterruptedSearchError, Proposal
from solver.schedule import Schedule, Simulation, simulate


class Fastest:
    """Judges schedules for one budget, within one time limit, and keeps the best.

    Of equally fast schedules the one with the smaller peak is kept, then the first. As a context
    it hands on the best so far when the search is interrupted (Ctrl-C), and ends at the deadline.
    """

    def __init__(self, graph: Graph, *, budget_bytes: int, time_limit_s: float) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._end = Deadline.after(time_limit_s)
        self._kept_s = KEPT_SHARE * time_limit_s
        self._best: tuple[Simulation, Schedule] | None = None
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._stopped = self._stopped or kind in (KeyboardInterrupt, OutOfTimeError)
        if kind is KeyboardInterrupt:
            raise InterruptedSearchError(self.proposal()) from None
        return kind is OutOfTimeError

    @property
    def deadline(self) -> Deadline:
        """When the search has to end, as things stand: with nothing found, KEPT_SHARE sooner."""
        return self._end.earlier(self._kept_s if self._best is None else 0.0)

    def fits(self, schedule: Schedule) -> bool:
        """Have the schedule judged, remember it if it is the best so far."""
        simulation = simulate(self._graph, schedule)
        if simulation.peak_bytes > self._budget_bytes:
            return False
        if self._best is None or _rank(simulation) < _rank(self._best[0]):
            self._best = simulation, schedule
        return True

    def is_faster(self, order: Sequence[str]) -> bool:
        """Whether running these nodes would be faster than the best so far."""
        if self._best is None:
            return True
        nodes = self._graph.node_by_name
        return math.fsum(nodes[name].time_s for name in order) < self._best[0].time_s

    def time_is_up(self) -> bool:
        """Whether the search has to stop; the proposal will say that it was stopped."""
        self._stopped = self._stopped or self.deadline.passed
        return self._stopped

    def proposal(self) -> Proposal:
        return Proposal(schedule=self._best[1] if self._best else None, timed_out=self._stopped)


def _rank(simulation: Simulation) -> tuple[float, int]:
    return simulation.time_s, simulation.peak_bytes
