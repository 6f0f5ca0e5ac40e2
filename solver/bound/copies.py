"""The cut at one position when storages may also be in host memory or on disk.

Consider node p as in `solver.bound.cut`. A storage that later nodes need and that is not on the
device at p is either recomputed or fetched the next time that it is there. So besides x[u] (u is on
the device at p) and r[n] (n is recomputed after p) there are h[u] (u is not on the device at p, and
is fetched the next time that it is there), b (seconds that the compute stream loses before p) and a
(seconds that it loses after p, not counting recomputation):

    minimise    a + b + sum of time_s[n] * r[n]
    subject to  x[u] + h[u] + r[maker(u)] >= 1       for each unit u that is needed after p
                x[v] + h[v] + r[maker(v)] >= r[n]    for each unit v that n reads
                sum of bytes[u] * x[u] <= budget - resident - what p makes and its workspace
                sum of bytes[u] * h[u] <= bytes of the host (and of the disk)
                h[u] = 0 where u is never stored: outputs of the graph, and what is not copyable
                x[u] = 1 where p reads u; r[n] = 0 where n is not recomputable, or never fits

and the rows of the two directions of the link (`solver.bound.link_rows`).

**Why it bounds every legal schedule.** Take x, h and r from the state of the schedule at p in
program order, the order in which bytes are counted; then the rows of the link hold. In total the
schedule takes the time of the first runs plus at least a + b + sum of time_s[n] * r[n]. The other
rows are those of `solver.bound.cut`, with two differences: only resident tensors are held in any
case, since what cannot be recomputed may be away too, and no alias keeps a node from being
recomputed (`StorageGraph.of` with `may_offload`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from solver.bound.cut import TIME_ERROR, CutMilp
from solver.bound.link_rows import LinkRows
from solver.bound.milp import Answer
from solver.bound.storage_graph import StorageGraph
from solver.schedule import Places
from solver.sizes_deadlines_progress import NEVER, Deadline


@dataclass(frozen=True)
class CopyCut:
    """The solution of the cut at one position.

    lost_share: time that every schedule within the budget loses, as a share of the baseline's (inf:
        nothing fits).
    kept, fetched: units that the solution has on the device at the position, and units that it
        fetches later (None: no solution found). Other units that are needed later are recomputed.
    """

    position: int
    lost_share: float
    kept: frozenset[int] | None
    fetched: frozenset[int] | None


class CopyMilp(CutMilp):
    """The program that the module describes.

    fetch: by unit, its column h.
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
        """Build the program.

        folded: folded with `may_offload`.
        allowance_bytes: taken from the budget.
        just_in_time: assume that nodes are recomputed right before their outputs are read, so that
            only those due before a fetch can hide it.

        With allowance_bytes or just_in_time the result is no bound.
        """
        self._places, self.position = places, position
        super().__init__(
            folded,
            positions=[position],
            budget_bytes=budget_bytes,
            allowance_bytes={position: allowance_bytes},
        )
        if self.fetch and places.host is not None:
            LinkRows(
                folded,
                position,
                self.program,
                keep=self.keep[0],
                fetch=self.fetch,
                recompute=self.recompute[0],
                host=places.host,
                disk=places.disk,
                just_in_time=just_in_time,
            ).add()

    def _candidates(self) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
        folded, p = self.folded, self.position
        made_later = {  # units that later nodes made may be away too
            u
            for u, uses in enumerate(folded.uses)
            if uses and folded.n_forward <= folded.maker[u] < p and uses[-1] >= p
        }
        for units, nodes in super()._candidates():
            yield made_later.union(units), nodes

    def _add_fetch_columns(self, p: int, keep: Mapping[int, int]) -> None:
        folded = self.folded
        for u in keep if self._places.host is not None else ():
            if folded.unit_bytes[u] and p not in folded.uses[u] and folded.may_be_stored(u):
                self.fetch[u] = self.program.variable()

    def _add_bytes(self, p: int, keep: Mapping[int, int]) -> None:
        super()._add_bytes(p, keep)
        if self.fetch:
            away_bytes = {column: self.folded.unit_bytes[u] for u, column in self.fetch.items()}
            self.add_byte_row(away_bytes, self._places.host_bytes + self._places.disk_bytes)

    def forbid_fetches(self, units: Iterable[int]) -> None:
        """Do not fetch these units next. The result is then no bound."""
        for u in units:
            if u in self.fetch:
                self.program.most[self.fetch[u]] = 0.0

    def solve(
        self,
        *,
        as_milp: bool,
        gap: float = 0.0,
        node_limit: int | None = None,
        deadline: Deadline = NEVER,
    ) -> CopyCut:
        """Solve as an LP or, if `as_milp`, as a MILP; the arguments are those of `Milp.solve`."""
        answer = self.program.solve(
            as_milp=as_milp, gap=gap, node_limit=node_limit, deadline=deadline
        )
        return self._to_cut(answer)

    def solve_near_lp(self, *, gap: float, node_limit: int, deadline: Deadline = NEVER) -> CopyCut:
        """An integer solution that keeps what the LP fully keeps, and fetches only what it fetches.

        Found within a tenth of a second, it is about as good as the best one. Its lost_share is the
        LP's.
        """
        relaxed = self.program.solve(as_milp=False, deadline=deadline)
        if relaxed.values is None:
            return self._to_cut(relaxed)
        least, most = list(self.program.least), list(self.program.most)
        for column in self.keep[0].values():
            if relaxed.values[column] > 1 - TIME_ERROR:
                least[column] = 1.0
        for column in self.fetch.values():
            if relaxed.values[column] < TIME_ERROR:
                most[column] = 0.0
        near = replace(self.program, least=least, most=most)
        answer = near.solve(as_milp=True, gap=gap, node_limit=node_limit, deadline=deadline)
        return self._to_cut(replace(answer, bound=relaxed.bound))

    def _to_cut(self, answer: Answer) -> CopyCut:
        lost_share, values = self.lost_share(answer), answer.values
        if values is None:
            return CopyCut(self.position, lost_share, None, None)
        kept = self.units_by_share(values)
        fetched = frozenset(
            u
            for u, column in self.fetch.items()
            if u not in kept
            and values[column] >= max(TIME_ERROR, 0.5 * (1 - values[self.keep[0][u]]))
        )
        return CopyCut(self.position, lost_share, kept, fetched)
