"""The cut at one position when storages may also be in host memory or on disk.

Stand at node p as in `solver.bound.cut`. A storage that later nodes need and that is not on the
device now comes back in one of two ways. Take the first: it is made again, or it is fetched. So
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

and the rows of the two directions of the link. T(i, j) is the time of the first runs of the nodes
i .. j - 1, c[u] the time of one copy of u, due[u] the first node after p that reads u:

    for each q < p:  sum of c_out[u] * h[u] over the u made at or after q  <=  T(q + 1, p) + b
    for each q > p:  sum of c_in[u] * h[u] over the u due in (p, q]
                         <=  T(p + 1, q) + a + sum of time_s[n] * r[n]

**Why it bounds every legal schedule.** Read x, h and r off the schedule as it stands at p in
program order, by which bytes count. Let h[u] = 1. Between p and its fetch u is never on the device,
so its data were stored before p, after the first run of its maker, and u was freed before p. The
free made the compute stream wait for the end of the store. So all stores of such units that were
made at or after q ran one after the other between the end of q and the start of p, which is the
time of the first runs in between and part of what is lost before p. They are on the host, or gone
on to the disk, at p. The fetch stands after p, and a copy starts when the compute stream has come
to its place; the node that is due waits for its end. So the fetches of all units due up to q ran
one after the other between the end of p and the start of q. What is lost there is at most what is
lost after p: the recomputation, each r[n] = 1 at least once, and a. Together the schedule takes the
time of the first runs and a + b + sum of time_s[n] * r[n]. The other rows are those of
`solver.bound.cut`; but nothing is there anyway except what is resident, as what cannot be made
again may be away too, and no alias keeps a node from being recomputed (`StorageGraph.of`,
`may_leave`).

**A sharper due.** Let n make w, read v, and let w be due at q, before v. If w is neither on the
device at p nor fetched next, n is recomputed before q. If v is fetched next, that is over by then.
So of c_in[v] * h[v] the part c_in[v] * (h[v] - x[w] - h[w]) counts as due at q.

**As a program.** The rows of the stores are those of one server with release times and a deadline:
F[u] >= F[of the unit made before u] + c[u] * h[u] and F[u] >= T(0, maker(u) + 1) + c[u] * h[u] say
the same with two rows for each unit. Those of the fetches take a running sum.

A disk adds two rows: what is away and not on the host was spilled before p, or comes back after it,
at the rate of the disk's link. A copy that takes longer than MOST_COPY_SHARE counts as if it took
that long, for the sake of the solver's tolerances; that only relaxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from solver.bound.cut import TIME_ERROR
from solver.bound.milp import Answer, Floats, Milp
from solver.bound.storage_graph import StorageGraph
from solver.schedule import Place, Places
from solver.sizes_deadlines_progress import NEVER, Deadline

MOST_COPY_SHARE = 100.0
"""Of the baseline's time: longer copies count as this long."""


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
        self.just_in_time = just_in_time
        self.folded = folded
        self.position = position
        self.budget_bytes = budget_bytes
        self.places = places
        there_anyway_bytes = int(folded.held_bytes[position]) + int(folded.own_bytes[position])
        self.room_bytes = budget_bytes - allowance_bytes - there_anyway_bytes
        baseline_s = folded.graph.baseline_time_s or 1.0
        self._baseline_s = baseline_s
        self._time_share = [time_s / baseline_s for time_s in folded.time_s]
        self._start_share = list(accumulate(self._time_share, initial=0.0))
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
        self.recompute = {n: add(cost=self._time_share[n]) for n in sorted(nodes)}
        self._add_covers()
        self._add_bytes()
        if self.away and places.host is not None:
            self._before = add(cost=1.0, most=math.inf, whole=False)
            self._after = add(cost=1.0, most=math.inf, whole=False)
            self._add_stores()
            self._add_fetches()
            self._add_disk()

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
        """Unit u is kept, fetched or made again, if its reader is there (none: in any case)."""
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

    def _share(self, time_s: float) -> float:
        return min(time_s / self._baseline_s, MOST_COPY_SHARE)

    def _add_stores(self) -> None:
        """F, by unit in the order in which they are made; the last is over when p starts."""
        folded, program = self.folded, self.program
        assert self.places.host is not None
        link, last = self.places.host.link, None
        for u in sorted(self.away, key=lambda u: (folded.maker[u], u)):
            over = program.variable(most=math.inf, whole=False)
            cost = self._share(link.out_s(folded.unit_bytes[u]))
            made = self._start_share[folded.maker[u] + 1]
            program.row([over, self.away[u]], [1.0, -cost], lower=made)
            if last is not None:
                program.row([over, last, self.away[u]], [1.0, -1.0, -cost], lower=0.0)
            last = over
        if last is not None:
            start = self._start_share[self.position]
            program.row([last, self._before], [1.0, -1.0], upper=start)

    def _add_fetches(self) -> None:
        """By node q at which something is due: what was fetched and lost up to there."""
        folded, program, p = self.folded, self.program, self.position
        assert self.places.host is not None
        jobs: dict[int, list[tuple[int, float]]] = {}
        made_of = self._find_made_of()
        for u, column in self.away.items():
            cost = self._share(self.places.host.link.in_s(folded.unit_bytes[u]))
            due = next((use for use in folded.uses[u] if use > p), folded.n_nodes)
            early, part = self._early(u, due, made_of)
            jobs.setdefault(due, []).append((column, cost))
            if part is not None:
                jobs.setdefault(due, []).append((part, -cost))
                jobs.setdefault(early, []).append((part, cost))
        lost = self._lost_by(jobs)
        done = self._start_share[min(p + 1, folded.n_nodes)]
        fetched: int | None = None
        for q in sorted(jobs):
            so_far = program.variable(most=math.inf, whole=False)
            row = dict.fromkeys([so_far], 1.0) | ({} if fetched is None else {fetched: -1.0})
            for column, cost in jobs[q]:
                row[column] = row.get(column, 0.0) - cost
            program.row(list(row), list(row.values()), lower=0.0)
            row = {so_far: 1.0, self._after: -1.0, **lost[q]}
            program.row(list(row), list(row.values()), upper=self._start_share[q] - done)
            fetched = so_far

    def _lost_by(self, jobs: Iterable[int]) -> dict[int, dict[int, float]]:
        """By node q: the columns of recomputation before it, with their time."""
        program, due = self.program, self._due_of_runs()
        lost: dict[int, dict[int, float]] = {}
        total: int | None = None
        left = sorted(self.recompute, key=lambda n: (due[n], n))
        for q in sorted(jobs):
            new = [n for n in left if due[n] <= q]
            if new:
                left = left[len(new) :]
                before, total = total, program.variable(most=math.inf, whole=False)
                row = {total: -1.0} | ({} if before is None else {before: 1.0})
                row |= {self.recompute[n]: self._time_share[n] for n in new}
                program.row(list(row), list(row.values()), lower=0.0)
            lost[q] = {} if total is None else {total: -1.0}
        return lost

    def _due_of_runs(self) -> dict[int, int]:
        """By node, the first q before which it may be recomputed."""
        p = self.position
        if not self.just_in_time:
            return dict.fromkeys(self.recompute, p)
        readers, due = self._readers(), dict[int, int]()
        for n in sorted(self.recompute, reverse=True):
            uses = [use for w in self.folded.makes[n] for use in self.folded.uses[w] if use > p]
            again = [due[m] for m in readers[n]]
            due[n] = min([self.folded.n_nodes, *uses, *again])
        return due

    def _readers(self) -> Mapping[int, list[int]]:
        """By node, those that may be recomputed and read what it makes."""
        readers: dict[int, list[int]] = {n: [] for n in self.recompute}
        for m in self.recompute:
            for u in self.folded.reads[m]:
                if self.folded.maker[u] in readers:
                    readers[self.folded.maker[u]].append(m)
        return readers

    def _early(
        self, v: int, due: int, made_of: Mapping[int, list[tuple[int, int]]]
    ) -> tuple[int, int | None]:
        """The first node that may need v sooner, for what is made of it, and a column for the part
        of v that it needs then (None: there is none such node).
        """
        found: tuple[int, int] | None = None
        for w, q in made_of.get(v, ()):
            if q < due and (found is None or q < found[0]):
                found = q, w
        if found is None:
            return due, None
        q, w = found
        part = self.program.variable(whole=False)
        columns = [part, self.away[v], self.keep[w]]
        values = [1.0, -1.0, 1.0]
        if w in self.away:
            columns.append(self.away[w])
            values.append(1.0)
        self.program.row(columns, values, lower=0.0)
        self.program.row([part, self.away[v]], [1.0, -1.0], upper=0.0)
        return q, part

    def _find_made_of(self) -> dict[int, list[tuple[int, int]]]:
        """By unit v: (w, q) for each w that may be made again from it and is due at q."""
        made_of: dict[int, list[tuple[int, int]]] = {}
        p = self.position
        for n in self.recompute:
            for w in self.folded.makes[n]:
                q = next((use for use in self.folded.uses[w] if use > p), None)
                if q is not None and w in self.keep and p not in self.folded.uses[w]:
                    for v in self.folded.reads[n]:
                        made_of.setdefault(v, []).append((w, q))
        return made_of

    def _add_disk(self) -> None:
        """What is not on the host at the position went to the disk before it, and comes back."""
        host, disk = self.places.host, self.places.disk
        if host is None or disk is None:
            return
        p, ends = self.position, self._start_share
        after = {column: self._time_share[n] for n, column in self.recompute.items()}
        self._disk_row(disk.link.out_bytes_per_s, {self._before: 1.0}, ends[p], host)
        window = ends[-1] - ends[min(p + 1, self.folded.n_nodes)]
        self._disk_row(disk.link.in_bytes_per_s, {self._after: 1.0, **after}, window, host)

    def _disk_row(
        self, bytes_per_s: float, lost: Mapping[int, float], window: float, host: Place
    ) -> None:
        """Bytes away <= of the host + rate * (window + what is lost), in shares of time."""
        size_bytes = self.folded.unit_bytes
        row = {c: self._share(size_bytes[u] / bytes_per_s) for u, c in self.away.items()}
        row |= {column: -value for column, value in lost.items()}
        upper = window + host.capacity_bytes / bytes_per_s / self._baseline_s
        self.program.row(list(row), list(row.values()), upper=upper)

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
