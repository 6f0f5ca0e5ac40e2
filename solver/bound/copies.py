"""The cut at one position when storages may also be in host memory or on disk.

Stand at node p as in `solver.bound.cut`. A storage that later nodes need and that is not on the
device now comes back in one of two ways. Take the first: it is recomputed, or it is fetched. So
beside x[u] (u is on the device at p) and r[n] (n is recomputed after p) there are h[u] (u is not on
the device at p, and the next time that it is there it was fetched) and the seconds b and a that the
compute stream loses before p, and after p beside recomputation:

    minimise    a + b + sum of time_s[n] * r[n]
    subject to  x[u] + h[u] + r[maker(u)] >= 1       for each unit u that is needed after p
                x[v] + h[v] + r[maker(v)] >= r[n]    for each unit v that n reads
                sum of bytes[u] * x[u] <= budget - resident - what p makes and its workspace
                sum of bytes[u] * h[u] <= bytes of the host (and of the disk)
                h[u] = 0 where u holds an output of the graph, which is never stored
                x[u] = 1 where p reads u; no r[n] where n may not run again, or never fits

and the rows of the two directions of the link (`solver.bound.link_rows`).

**Why it bounds every legal schedule.** Read x, h and r off the schedule as it stands at p in
program order, by which bytes count; then the rows of the link hold. Together the schedule takes the
time of the first runs and a + b + sum of time_s[n] * r[n]. The other rows are those of
`solver.bound.cut`; but nothing is there anyway except what is resident, as what cannot be made
again may be away too, and no alias keeps a node from being recomputed (`StorageGraph.of`,
`may_leave`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from solver.bound.cut import TIME_ERROR
from solver.bound.link_rows import LinkRows
from solver.bound.milp import Answer, Floats, Milp
from solver.bound.storage_graph import StorageGraph
from solver.schedule import Places
from solver.sizes_deadlines_progress import NEVER, Deadline


@dataclass(frozen=True)
class CopyCut:
    """The cut at one position, solved.

    lost_share: time that no schedule within the budget avoids to lose, as a share of the baseline's
    (inf: nothing fits).
    kept, away: units that the solution has on the device, and fetches later (None: none found). The
    others that are needed later are recomputed.
    cost_share: what the solution loses (inf: not known).
    """

    position: int
    lost_share: float
    kept: frozenset[int] | None
    away: frozenset[int] | None
    timed_out: bool = False
    cost_share: float = math.inf


class CopyProgram:
    """The program of the module for one position.

    keep, away, recompute: the columns x and h of units, and r of nodes.
    """

    def __init__(
        self,
        folded: StorageGraph,
        *,
        position: int,
        budget_bytes: int,
        places: Places,
        allowance_bytes: int = 0,
        just_in_time: bool = False,
    ) -> None:
        """folded: with `may_leave`.

        allowance_bytes: taken from the budget.
        just_in_time: what is recomputed is recomputed right before it is read, so that not all of
            it can hide a fetch that is due soon. With either the program proves nothing.
        """
        self.folded = folded
        self.position = position
        self.budget_bytes = budget_bytes
        self.places = places
        there_anyway_bytes = int(folded.held_bytes[position]) + int(folded.own_bytes[position])
        self.room_bytes = budget_bytes - allowance_bytes - there_anyway_bytes
        baseline_s = folded.graph.baseline_time_s or 1.0
        time_share = [time_s / baseline_s for time_s in folded.time_s]
        start_share = list(accumulate(time_share, initial=0.0))
        self._scale = float(max(folded.unit_bytes, default=0) or 1)
        self.program = Milp(constant=folded.graph.baseline_time_s / baseline_s)
        units, nodes = self._candidates()
        add = self.program.variable
        reads = set(folded.reads[position]) if position < folded.n_nodes else set[int]()
        self.keep = {
            u: add(least=float(u in reads or not folded.unit_bytes[u])) for u in sorted(units)
        }
        self.away: dict[int, int] = {}
        if places.host is not None:
            self.away = {
                u: add()
                for u in self.keep
                if folded.unit_bytes[u] and u not in reads and not folded.is_output(u)
            }
        self.recompute = {n: add(cost=time_share[n]) for n in sorted(nodes)}
        self._add_covers()
        self._add_bytes()
        if self.away and places.host is not None:
            LinkRows(
                folded,
                position,
                self.program,
                keep=self.keep,
                away=self.away,
                recompute=self.recompute,
                before=add(cost=1.0, most=math.inf, whole=False),
                after=add(cost=1.0, most=math.inf, whole=False),
                start_share=start_share,
                host=places.host,
                disk=places.disk,
                just_in_time=just_in_time,
            ).add()

    def _candidates(self) -> tuple[set[int], list[int]]:
        """Units that may matter at the position, and nodes that may be recomputed after it."""
        folded, p = self.folded, self.position
        may = folded.may_recompute(
            after=p, before=folded.n_nodes + 1, budget_bytes=self.budget_bytes
        )
        units = {
            u
            for u, uses in enumerate(folded.uses)
            if uses and folded.maker[u] < p and uses[-1] >= p
        }
        nodes = []
        for n in range(min(p, folded.n_forward) - 1, -1, -1):
            if may[n] and not units.isdisjoint(folded.makes[n]):
                units.update(folded.reads[n])
                nodes.append(n)
        return units, nodes

    def _add_covers(self) -> None:
        folded, p = self.folded, self.position
        for u in self.keep:
            if p not in folded.uses[u] and any(use > p for use in folded.uses[u]):
                self._cover(u, ())
        for n, column in self.recompute.items():
            for u in folded.reads[n]:
                self._cover(u, (column,))

    def _cover(self, u: int, readers: tuple[int, ...]) -> None:
        """Unit u is kept, fetched or recomputed, if its reader is there (none: in any case)."""
        columns = [self.keep[u]]
        if u in self.away:
            columns.append(self.away[u])
        maker = self.folded.maker[u]
        if maker in self.recompute:
            columns.append(self.recompute[maker])
        values = [1.0] * len(columns) + [-1.0] * len(readers)
        self.program.row([*columns, *readers], values, lower=0.0 if readers else 1.0)

    def _add_bytes(self) -> None:
        folded, places = self.folded, self.places
        for u, column in self.keep.items():
            # Said outright: the solver's tolerance on a row of gigabytes lets some bytes pass.
            if folded.unit_bytes[u] > self.room_bytes and not self.program.least[column]:
                self.program.most[column] = 0.0
        self._bytes_row(self.keep, self.room_bytes)
        if places.host is not None:
            disk_bytes = 0 if places.disk is None else places.disk.capacity_bytes
            self._bytes_row(self.away, places.host.capacity_bytes + disk_bytes)

    def _bytes_row(self, columns: Mapping[int, int], most_bytes: int) -> None:
        size_bytes = self.folded.unit_bytes
        self.program.row(
            list(columns.values()),
            [size_bytes[u] / self._scale for u in columns],
            upper=most_bytes / self._scale,
        )

    def forbid(self, units: Iterable[int]) -> None:
        """Do not fetch these next: proves nothing more."""
        for u in units:
            if u in self.away:
                self.program.most[self.away[u]] = 0.0

    def solve(
        self,
        *,
        whole: bool,
        gap: float = 0.0,
        node_limit: int | None = None,
        deadline: Deadline = NEVER,
    ) -> CopyCut:
        answer = self.program.solve(whole=whole, gap=gap, node_limit=node_limit, deadline=deadline)
        return self._read(answer)

    def solve_near_lp(self, *, gap: float, node_limit: int, deadline: Deadline = NEVER) -> CopyCut:
        """A whole solution that keeps what the LP keeps whole, and fetches only what it fetches.

        Within a tenth of a second about as good as the best one; its bound is the LP's.
        """
        relaxed = self.program.solve(whole=False, deadline=deadline)
        if relaxed.values is None:
            return self._read(relaxed)
        least, most = list(self.program.least), list(self.program.most)
        for column in self.keep.values():
            if relaxed.values[column] > 1 - TIME_ERROR:
                least[column] = 1.0
        for column in self.away.values():
            if relaxed.values[column] < TIME_ERROR:
                most[column] = 0.0
        near = replace(self.program, least=least, most=most)
        answer = near.solve(whole=True, gap=gap, node_limit=node_limit, deadline=deadline)
        return self._read(replace(answer, bound=relaxed.bound))

    def _read(self, answer: Answer) -> CopyCut:
        lost_share = max(0.0, answer.bound - self.program.constant - TIME_ERROR)
        if answer.values is None:
            return CopyCut(self.position, lost_share, None, None, answer.timed_out)
        values = answer.values
        kept, away = self._rounded(values)
        cost_share = float(np.dot(self.program.cost, values))
        return CopyCut(self.position, lost_share, kept, away, answer.timed_out, cost_share)

    def _rounded(self, values: Floats) -> tuple[frozenset[int], frozenset[int]]:
        """Units by their shares, the largest first, while bytes last."""
        share = {u: values[column] for u, column in self.keep.items()}
        room, kept = self.room_bytes, set()
        for u in sorted(share, key=lambda u: (-share[u], u)):
            size_bytes = self.folded.unit_bytes[u]
            if share[u] > TIME_ERROR and size_bytes <= room:
                kept.add(u)
                room -= size_bytes
        away = {
            u
            for u, column in self.away.items()
            if u not in kept and values[column] >= max(TIME_ERROR, 0.5 * (1 - share[u]))
        }
        return frozenset(kept), frozenset(away)
