"""Plan a stretch of the step anew by an integer program, with everything before and after it fixed.

The stretch reaches from one position to another. The runs of a schedule before and after it stay,
except those that only served the old stretch. It begins with units that are on the device, or that
could have stayed there since their last read because they fit beside what the schedule holds since
then. It ends with what later runs read without making it. The program is that of cuts
(`solver.bound.cut`) at all positions of the stretch, with r[n,k] only for entries of a menu, and
with the rows of `solver.methods.auto.recompute_rows`, so that its solutions mostly fit.

Since nothing else takes part, these programs have some hundred to some thousand columns however
long the step is, and branch and bound solves most of them at the root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from graphs.graph import Graph
from solver.bound import CutMilp, StorageGraph, add_rounded_byte_rows
from solver.methods.auto.from_cuts import droppable_names, order_just_in_time
from solver.methods.auto.recompute_rows import add_recompute_rows
from solver.methods.auto.runs import Runs
from solver.schedule import Schedule, free_after_last_use, missing_computes, without_dead_computes
from solver.sizes_deadlines_progress import NEVER, Deadline


@dataclass(frozen=True)
class Stretch:
    """A part of the step that is planned anew.

    first, last: its positions; first is at least 1.
    menu: by position, the nodes that may be recomputed right before it.
    """

    first: int
    last: int
    menu: Mapping[int, Sequence[int]]


class StretchMilp(CutMilp):
    """The program that the module describes.

    last_before: the last run before the stretch.
    last_inside: the last run of the stretch.
    held_since: units that could have stayed on the device until the stretch begins, and the run
        since which they would be held.
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
        """Build the program.

        runs: the schedule's runs.
        live_bytes: by run, the bytes on the device.

        Raises OutOfTimeError.
        """
        self._stretch, self._runs, self._live_bytes = stretch, runs, live_bytes
        self.last_before = runs.first_run[stretch.first - 1]
        self.last_inside = runs.first_run[stretch.last]
        self._on_device_before = runs.needed_after(self.last_before)
        self._needed_after = runs.needed_after(self.last_inside)
        positions = range(stretch.first - 1, stretch.last + 1)
        super().__init__(folded, positions=positions, budget_bytes=budget_bytes, deadline=deadline)
        self.held_since = self._units_that_could_stay()
        self._add_ends()
        add_rounded_byte_rows(self)
        add_recompute_rows(self, deadline=deadline)

    def _end(self, k: int) -> int:
        return self.positions[k + 1] if k + 1 < len(self.positions) else self.positions[k] + 1

    def _candidates(self) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
        folded = self.folded
        wanted = set(self._needed_after)
        found = []
        for p in reversed(self.positions):
            n_run = min(p, folded.n_forward)
            menu = self._stretch.menu.get(p + 1, ()) if p < self._stretch.last else ()
            nodes = [n for n in menu if n < n_run and not folded.cannot_recompute(n, p + 1)]
            wanted.update(folded.reads[p], *(folded.reads[n] for n in nodes))
            found.append(([u for u in wanted if folded.maker[u] < n_run], nodes))
        yield from reversed(found)

    def _add_totals(self) -> None:
        """Add no R[n,k].

        With them DenseNet-121 and ViT-B lose the same after 40 s, to within 0.1 points.
        """

    def _units_that_could_stay(self) -> Mapping[int, int]:
        """Find `held_since`: units that fit beside what the schedule holds after their last use."""
        folded, p = self.folded, self.positions[0]
        # by run, the maximum from there up to the stretch
        most = np.maximum.accumulate(self._live_bytes[self.last_before :: -1])[::-1]
        held_since = {}
        for u in sorted(self.keep[0].keys() - self._on_device_before):
            since = self._runs.last_read(u, self.last_before) + 1
            room = self.budget_bytes - folded.unit_bytes[u]
            fits = since > self.last_before or most[since] <= room
            if since and fits and not folded.is_pinned(u, p):
                held_since[u] = since
        return held_since

    def _add_ends(self) -> None:
        """Add the rows for what is on the device when the stretch begins, and when it ends."""
        program, folded, begin = self.program, self.folded, self.keep[0]
        for u, column in begin.items():
            if (
                folded.unit_bytes[u]
                and u not in self._on_device_before
                and u not in self.held_since
            ):
                program.most[column] = program.least[column]
        for u in self._needed_after & self.keep[-1].keys():
            program.least[self.keep[-1][u]] = 1.0
        for since, until in pairwise(sorted({*self.held_since.values(), self.last_before + 1})):
            held = {begin[u]: folded.unit_bytes[u] for u, s in self.held_since.items() if s < until}
            room = self.budget_bytes - int(self._live_bytes[since:until].max())
            self.add_byte_row(held, room)

    def splice_into(self, kept: Mapping[int, frozenset[int]], runs: Runs) -> Schedule:
        """Put the solution in the place of the stretch in these runs.

        runs: those of the schedule, or of a newer one.

        The result may be illegal; the simulator decides.
        """
        folded, graph, begin = self.folded, self.folded.graph, self.positions[0]
        last_before = runs.first_run[self._stretch.first - 1]
        last_inside = runs.first_run[self._stretch.last]
        names = [graph.nodes[n].name for n in runs.nodes]
        before, after = names[: last_before + 1], names[last_inside + 1 :]
        available = {tensor.name for tensor in graph.resident}
        for name in before:
            for output in graph.node_by_name[name].outputs:
                available.difference_update(graph.views.get(output, ()))
            available.update(graph.node_by_name[name].outputs)
        available.difference_update(droppable_names(folded, kept[begin], begin))
        positions = range(self._stretch.first, self._stretch.last + 1)
        inside = order_just_in_time(folded, kept, positions, available, deadline=self._deadline)
        # Recomputing a storage drops its views, so some may be missing.
        inside += missing_computes(graph, _tensors_read_first(graph, after), available)
        order = without_dead_computes(graph, [*before, *inside, *after])
        return free_after_last_use(graph, order)


def _tensors_read_first(graph: Graph, names: Iterable[str]) -> list[str]:
    """Tensors that these nodes, or the end of the step, read before these nodes make them."""
    made, found = set[str](), dict[str, None]()
    for name in names:
        found.update((need, None) for need in graph.needs[name] if need not in made)
        made.update(graph.node_by_name[name].outputs)
    found.update((name, None) for name in graph.outputs if name not in made)
    return [*found]
