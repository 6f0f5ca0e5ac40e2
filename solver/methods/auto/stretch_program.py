"""A stretch of the step planned anew: an integer program, with all before and after it as it is.

The stretch reaches from one position to another. The runs of a schedule before and after it stay,
and so do the units that its later runs read without making them: the stretch leaves them on the
device. It begins with units that are there, or that could have stayed there since their last read:
over the runs since then they fit beside what the schedule holds. The program is that of cuts
(`solver.bound.cut`) at all positions of the stretch, with r[n,k] only where a menu says so, and
with the rows of `solver.methods.auto.recompute_rows`, so what it finds mostly fits.

As nothing else takes part, programs of a stretch have some hundred to some thousand columns however
long the step is, and branch and bound solves most of them at its root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from solver.bound import CutMilp, StorageGraph, round_bytes
from solver.methods.auto.from_cuts import names_let_go, replay
from solver.methods.auto.menu_program import kept_by_best
from solver.methods.auto.recompute_rows import add_recompute_rows
from solver.methods.auto.runs import Runs
from solver.schedule import Schedule, free_after_last_use, without_dead_computes
from solver.sizes_deadlines_progress import NEVER, Deadline


@dataclass(frozen=True)
class Stretch:
    """Positions from first to last, 1 at least. menu: by position, the nodes that may be recomputed
    right before it.
    """

    first: int
    last: int
    menu: Mapping[int, Sequence[int]]


class StretchMilp(CutMilp):
    """The program of the module.

    before, after: the last run that stays before the stretch, and the last run of it.
    held_since: by unit that may be there when the stretch begins and is not, the run since which it
        would be held.
    """

    def __init__(
        self,
        folded: StorageGraph,
        stretch: Stretch,
        *,
        runs: Runs,
        live_bytes: npt.NDArray[np.int64],
        budget_bytes: int,
        deadline: Deadline = NEVER,
    ) -> None:
        """live_bytes: by run. Raises OutOfTimeError."""
        self._stretch = stretch
        self.before, self.after = runs.first[stretch.first - 1], runs.first[stretch.last]
        self._there = runs.there_after(self.before)
        self._read_after = runs.there_after(self.after)
        positions = range(stretch.first - 1, stretch.last + 1)
        super().__init__(folded, positions=positions, budget_bytes=budget_bytes, deadline=deadline)
        self.held_since = self._may_have_stayed(runs, live_bytes)
        self._add_ends(live_bytes)
        round_bytes(self)
        add_recompute_rows(self, deadline=deadline)

    def _end(self, k: int) -> int:
        return self.positions[k + 1] if k + 1 < len(self.positions) else self.positions[k] + 1

    def _candidates(self) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
        folded = self.folded
        wanted = set(self._read_after)
        found = []
        for p, following in zip(
            reversed(self.positions), [None, *reversed(self.positions[1:])], strict=True
        ):
            made = min(p, folded.n_forward)
            menu = () if following is None else self._stretch.menu.get(following, ())
            nodes = [n for n in menu if n < made]
            wanted.update(folded.reads[p], *(folded.reads[n] for n in nodes))
            found.append(([u for u in wanted if folded.maker[u] < made], nodes))
        yield from reversed(found)

    def _add_totals(self) -> None:
        """Left out: what is recomputed in one place and read in another is far apart here."""

    def _may_have_stayed(self, runs: Runs, live_bytes: npt.NDArray[np.int64]) -> Mapping[int, int]:
        folded, p = self.folded, self.positions[0]
        most = np.maximum.accumulate(live_bytes[self.before :: -1])[::-1]  # from a run on
        since = {}
        for u in self.keep[0].keys() - self._there:
            first = runs.last_read(u, self.before) + 1
            fits = first > self.before or most[first] + folded.unit_bytes[u] <= self.budget_bytes
            if first and fits and not folded.is_pinned(u, p):
                since[u] = first
        return since

    def _add_ends(self, live_bytes: npt.NDArray[np.int64]) -> None:
        """What is there when the stretch begins, and when it ends."""
        program, folded, begin = self.program, self.folded, self.keep[0]
        for u, column in begin.items():
            if folded.unit_bytes[u] and u not in self._there and u not in self.held_since:
                program.most[column] = program.least[column]
        for u in self._read_after & self.keep[-1].keys():
            program.least[self.keep[-1][u]] = 1.0
        for start, end in pairwise(sorted({*self.held_since.values(), self.before + 1})):
            held = {begin[u]: folded.unit_bytes[u] for u, s in self.held_since.items() if s < end}
            self.add_byte_row(held, self.budget_bytes - int(live_bytes[start:end].max()))

    def schedule(self, runs: Runs, *, below: float, deadline: Deadline = NEVER) -> Schedule | None:
        """The best schedule found; None: none that loses less than this in the stretch, as a share
        of the baseline's time.
        """
        kept = kept_by_best(self, below=below, deadline=deadline)
        if kept is None:
            return None
        folded, graph = self.folded, self.folded.graph
        names = [graph.nodes[n].name for n in runs.nodes]
        available = {tensor.name for tensor in graph.resident}
        for name in names[: self.before + 1]:
            for output in graph.node_by_name[name].outputs:
                available.difference_update(graph.views.get(output, ()))
            available.update(graph.node_by_name[name].outputs)
        first, *rest = self.positions
        available.difference_update(names_let_go(folded, kept[first], first))
        stretch = replay(folded, kept, range(rest[0], rest[-1] + 1), available, deadline=deadline)
        order = [*names[: self.before + 1], *stretch, *names[self.after + 1 :]]
        return free_after_last_use(graph, without_dead_computes(graph, order))
