"""The rows for the link to the host, in both directions, and for the disk's link.

They belong to the program of `solver.bound.copies` and use its names. In addition, T(i, j) is the
time of the first runs of nodes i .. j - 1, c_out[u] and c_in[u] are the times of one store and one
fetch of u, and u is due at the first node after p that reads it:

    for each q < p:  sum of c_out[u] * h[u] over the u made at or after q  <=  T(q + 1, p) + b
    for each q > p:  sum of c_in[u] * h[u] over the u due in (p, q]
                         <=  T(p + 1, q) + a + sum of time_s[n] * r[n]

**Why every legal schedule obeys.** Let h[u] = 1. Between p and its fetch u is never on the device,
so its data were stored before p, after the first run of its maker, and u was freed before p. The
free made the compute stream wait for the end of the store. So the stores of all such units that
were made at or after q ran one after the other between the end of q and the start of p. That period
is the time of the first runs in it and part of what is lost before p. At p the data are on the
host, or have moved on to the disk. The fetch comes after p in program order. A copy starts when the
compute stream has reached its place, and the node at which u is due waits for its end. So the
fetches of all units due up to q ran one after the other between the end of p and the start of q.
What is lost there is at most what is lost after p: the recomputation, each r[n] = 1 at least once,
and a.

**A sharper due.** Let n make w and read v, and let w be due at q, before v is due. If w is neither
on the device at p nor fetched next, n is recomputed before q. If v is fetched next, that fetch is
over by then. So the part c_in[v] * (h[v] - x[w] - h[w]) of c_in[v] * h[v] counts as due at q.

**As a program.** The rows of the stores are those of one server with release times and a deadline.
With F[u], the end of the store of u, two rows for each unit say the same:

    F[u] >= F[of the unit made before u] + c_out[u] * h[u]
    F[u] >= T(0, maker(u) + 1) + c_out[u] * h[u]

The rows of the fetches use a running sum.

A disk adds two rows: bytes that are away and do not fit on the host went to the disk before p, and
come back after p, at the rates of the disk's link. A copy that takes longer than MOST_COPY_SHARE
counts as if it took that long, because of the solver's tolerances; that only relaxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

from solver.bound.milp import Milp
from solver.bound.storage_graph import StorageGraph
from solver.schedule import Place

MOST_COPY_SHARE = 100.0
"""Longer copies count as this long; a share of the baseline's time."""


@dataclass(frozen=True)
class LinkRows:
    """Adds these rows to a program.

    keep, fetch, recompute: the columns x and h of units, and r of nodes.
    just_in_time: assume that nodes are recomputed right before their outputs are read, so that only
        those due before a fetch can hide it.
    """

    folded: StorageGraph
    position: int
    program: Milp
    keep: Mapping[int, int]
    fetch: Mapping[int, int]
    recompute: Mapping[int, int]
    host: Place
    disk: Place | None
    just_in_time: bool

    def add(self) -> None:
        add_lost_time = partial(self.program.variable, cost=1.0, most=math.inf, integer=False)
        b, a = add_lost_time(), add_lost_time()
        self._add_stores(b)
        self._add_fetches(a)
        if self.disk is not None:
            self._add_disk(self.disk, b, a)

    @cached_property
    def _baseline_s(self) -> float:
        return self.folded.graph.baseline_time_s or 1.0

    @cached_property
    def _start_share(self) -> list[float]:
        """T(0, n) by node n, as a share of the baseline's time."""
        shares = (time_s / self._baseline_s for time_s in self.folded.time_s)
        return list(accumulate(shares, initial=0.0))

    def _time_share(self, n: int) -> float:
        return self.folded.time_s[n] / self._baseline_s

    def _copy_share(self, time_s: float) -> float:
        return min(time_s / self._baseline_s, MOST_COPY_SHARE)

    def _add_stores(self, b: int) -> None:
        """Add F by unit, in the order of making; the last store is over when p starts."""
        folded, program = self.folded, self.program
        link, last_store_end = self.host.link, None
        for u in sorted(self.fetch, key=lambda u: (folded.maker[u], u)):
            store_end = program.variable(most=math.inf, integer=False)
            cost = self._copy_share(link.out_s(folded.unit_bytes[u]))
            made_share = self._start_share[folded.maker[u] + 1]
            program.row([store_end, self.fetch[u]], [1.0, -cost], lower=made_share)
            if last_store_end is not None:
                program.row(
                    [store_end, last_store_end, self.fetch[u]], [1.0, -1.0, -cost], lower=0.0
                )
            last_store_end = store_end
        if last_store_end is not None:
            start_share = self._start_share[self.position]
            program.row([last_store_end, b], [1.0, -1.0], upper=start_share)

    def _add_fetches(self, a: int) -> None:
        """For each node q at which units are due, limit the fetches up to q by the time up to q."""
        folded, program, p = self.folded, self.program, self.position
        jobs: dict[int, list[tuple[int, float]]] = {}
        recomputed_from = self._find_recomputed_from()
        for u, column in self.fetch.items():
            cost = self._copy_share(self.host.link.in_s(folded.unit_bytes[u]))
            due = next((use for use in folded.uses[u] if use > p), folded.n_nodes)
            # A part of u may be due early: it moves from the jobs at `due` to those at `early`.
            early, part = self._early_part(u, due, recomputed_from)
            jobs.setdefault(due, []).append((column, cost))
            if part is not None:
                jobs.setdefault(due, []).append((part, -cost))
                jobs.setdefault(early, []).append((part, cost))
        # The running sum of fetches up to q is at most the time from p to q plus what is lost.
        lost_terms = self._recompute_terms_before(jobs)
        start_share = self._start_share[min(p + 1, folded.n_nodes)]
        fetched_before: int | None = None
        for q in sorted(jobs):
            fetched_by_now = program.variable(most=math.inf, integer=False)
            row = dict.fromkeys([fetched_by_now], 1.0) | (
                {} if fetched_before is None else {fetched_before: -1.0}
            )
            for column, cost in jobs[q]:
                row[column] = row.get(column, 0.0) - cost
            program.row(list(row), list(row.values()), lower=0.0)
            row = {fetched_by_now: 1.0, a: -1.0, **lost_terms[q]}
            program.row(list(row), list(row.values()), upper=self._start_share[q] - start_share)
            fetched_before = fetched_by_now

    def _recompute_terms_before(self, jobs: Iterable[int]) -> dict[int, dict[int, float]]:
        """By node q: the columns, and their coefficients, that subtract recomputation before q."""
        program, due = self.program, self._due_by_node()
        terms: dict[int, dict[int, float]] = {}
        total: int | None = None
        remaining = sorted(self.recompute, key=lambda n: (due[n], n))
        for q in sorted(jobs):
            newly_due = [n for n in remaining if due[n] <= q]
            if newly_due:
                remaining = remaining[len(newly_due) :]
                total_before, total = total, program.variable(most=math.inf, integer=False)
                row = {total: -1.0} | ({} if total_before is None else {total_before: 1.0})
                row |= {self.recompute[n]: self._time_share(n) for n in newly_due}
                program.row(list(row), list(row.values()), lower=0.0)
            terms[q] = {} if total is None else {total: -1.0}
        return terms

    def _due_by_node(self) -> dict[int, int]:
        """By recomputable node, the first node before which it may be recomputed."""
        p = self.position
        if not self.just_in_time:
            return dict.fromkeys(self.recompute, p)
        # by node, the recomputable nodes that read what it makes
        readers: dict[int, list[int]] = {n: [] for n in self.recompute}
        for m in self.recompute:
            for u in self.folded.reads[m]:
                if self.folded.maker[u] in readers:
                    readers[self.folded.maker[u]].append(m)
        due: dict[int, int] = {}
        for n in sorted(self.recompute, reverse=True):
            uses = [use for w in self.folded.makes[n] for use in self.folded.uses[w] if use > p]
            due[n] = min([self.folded.n_nodes, *uses, *(due[m] for m in readers[n])])
        return due

    def _early_part(
        self, v: int, due: int, recomputed_from: Mapping[int, list[tuple[int, int]]]
    ) -> tuple[int, int | None]:
        """Where v is needed early, to recompute something made from it that is due before v.

        Returns the first such node q, and a column for the part of v that counts as due there.
        Without such a node: (due, None).
        """
        found: tuple[int, int] | None = None
        for w, q in recomputed_from.get(v, ()):
            if q < due and (found is None or q < found[0]):
                found = q, w
        if found is None:
            return due, None
        q, w = found
        part = self.program.variable(integer=False)
        columns = [part, self.fetch[v], self.keep[w]]
        values = [1.0, -1.0, 1.0]
        if w in self.fetch:
            columns.append(self.fetch[w])
            values.append(1.0)
        self.program.row(columns, values, lower=0.0)
        self.program.row([part, self.fetch[v]], [1.0, -1.0], upper=0.0)
        return q, part

    def _find_recomputed_from(self) -> dict[int, list[tuple[int, int]]]:
        """By unit v: (w, q) for each unit w that may be recomputed from it and is due at q."""
        recomputed_from: dict[int, list[tuple[int, int]]] = {}
        p = self.position
        for n in self.recompute:
            for w in self.folded.makes[n]:
                q = next((use for use in self.folded.uses[w] if use > p), None)
                if q is not None and w in self.keep and p not in self.folded.uses[w]:
                    for v in self.folded.reads[n]:
                        recomputed_from.setdefault(v, []).append((w, q))
        return recomputed_from

    def _add_disk(self, disk: Place, b: int, a: int) -> None:
        """Add the disk's rows, for bytes away that do not fit on the host."""
        p, start_share = self.position, self._start_share
        recompute_terms = {column: self._time_share(n) for n, column in self.recompute.items()}
        self._add_disk_row(disk.link.out_bytes_per_s, {b: 1.0}, start_share[p])
        window = start_share[-1] - start_share[min(p + 1, self.folded.n_nodes)]
        self._add_disk_row(disk.link.in_bytes_per_s, {a: 1.0, **recompute_terms}, window)

    def _add_disk_row(
        self, bytes_per_s: float, lost_terms: Mapping[int, float], window: float
    ) -> None:
        """Add: bytes away <= host capacity + rate * (window + lost time).

        All in shares of the baseline's time.
        """
        size_bytes = self.folded.unit_bytes
        row = {c: self._copy_share(size_bytes[u] / bytes_per_s) for u, c in self.fetch.items()}
        row |= {column: -value for column, value in lost_terms.items()}
        upper = window + self.host.capacity_bytes / bytes_per_s / self._baseline_s
        self.program.row(list(row), list(row.values()), upper=upper)
