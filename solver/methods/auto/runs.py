"""An order of nodes as lifetimes of units, each from a making to its last read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from solver.bound import StorageGraph
from solver.schedule import Compute, Schedule, Simulation


def live_bytes(schedule: Schedule, simulation: Simulation) -> npt.NDArray[np.int64]:
    """By run of the schedule's order: the bytes on the device while it runs."""
    by_op = zip(schedule.ops, simulation.live_bytes, strict=True)
    return np.array([live for op, live in by_op if isinstance(op, Compute)], dtype=np.int64)


class Runs:
    """The runs of an order.

    nodes: by run, the node that runs.
    first_run: by node, its first run.
    made: by unit, the runs that make it.
    last: by unit and making, the last run that reads it (or the making itself).
    repeats: the runs that are recomputations.
    """

    def __init__(self, folded: StorageGraph, order: Sequence[str]) -> None:
        self.folded = folded
        self.nodes = [folded.position[name] for name in order]
        self.made: list[list[int]] = [[] for _ in range(folded.n_units)]
        self.last: list[list[int]] = [[] for _ in range(folded.n_units)]
        self.repeats: list[int] = []
        self.first_run: dict[int, int] = {}
        for i, n in enumerate(self.nodes):
            for u in folded.reads[n]:
                if self.last[u]:
                    self.last[u][-1] = i
            for u in folded.makes[n]:
                self.made[u].append(i)
                self.last[u].append(i)
            if self.first_run.setdefault(n, i) != i:
                self.repeats.append(i)
        for u in filter(folded.is_output, range(folded.n_units)):
            self.last[u][-1] = len(order)

    def to_hold_instead_of(self, i: int) -> list[tuple[int, int]] | None:
        """What has to be held if the run at i is removed: (unit, run after its last use).

        Only units that are read later are listed. Returns None if the run cannot be removed: it is
        the first to make a unit, or makes none of its own (a view).
        """
        held = []
        for u in self.folded.makes[self.nodes[i]]:
            k = self.made[u].index(i)
            if k == 0:
                return None
            if self.last[u][k] > i:
                held.append((u, self.last[u][k - 1] + 1))
        return held if self.folded.makes[self.nodes[i]] else None

    def remove_run(self, i: int) -> None:
        """Remove the run at i: previous lifetimes of its units extend to the removed ones' ends."""
        for u in self.folded.makes[self.nodes[i]]:
            k, last = self.made[u].index(i), self.last[u]
            if last[k] > i:
                last[k - 1] = last[k]
            del self.made[u][k], last[k]

    def last_read(self, u: int, i: int) -> int:
        """The last run that reads what unit u holds when run i ends, or else made it.

        Returns -1 if the unit was not made by then.
        """
        made = bisect_right(self.made[u], i)
        return self.last[u][made - 1] if made else -1

    def needed_after(self, i: int) -> frozenset[int]:
        """Units that are made by the end of run i and read later."""
        return frozenset(u for u in range(len(self.made)) if self.last_read(u, i) > i)
