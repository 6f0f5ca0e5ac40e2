"""The best schedule that can be put together from the reruns of schedules seen before.

Each schedule that the search has judged, whether it fits or not, says which nodes it ran again and
right before which moment (the first run of a node). All of these together are a menu. With a moment
for each place on it and for each moment at which memory may run short, p_1 < ... < p_K, the program
is the one of several cuts (`solver.bound.cut`), with r[n,k] only for what is on the menu:

    minimise    sum of time_s[n] * r[n,k]
    subject to  x[u,k] + r[maker(u),k] >= 1        u read by a first run between p_k and p_{k+1}
                x[v,k] + r[maker(v),k] >= r[n,k]   n reads v
                x[u,k+1] <= x[u,k] + r[maker(u),k]
                sum of bytes[u] * x[u,k] <= budget - what is there anyway - allowance[k]
                the single cut's rows at the moment that binds, over R[n] = n runs again at all

As most nodes are on the menu at one or two places, few units are touched between two moments; for
the others x[u,k+1] and x[u,k] are one column. So all moments of the backward pass fit into a
program that a MILP solver takes seconds for. Its solution is replayed. Bytes that the reruns
themselves take between two moments are not in the rows: where the judge sees an overflow, the
moment gets an allowance and the program is solved again.

It proves nothing about schedules that use other reruns. It is never worse than the schedules that
made the menu where the program is solved to the end, and often much better: evictions and cuts each
get some part of the step right.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from solver.bound import FoldedGraph, Milp
from solver.common import NEVER, Deadline
from solver.methods.auto.from_cuts import FoldedSimulation, schedule_from_cuts
from solver.methods.auto.search import Search

GAP = 2e-4
"""The program is solved to within this share of the baseline's time."""
NODES_TIMES_COLUMNS = 100_000
"""Branch-and-bound nodes times columns that one solve may take: some ten seconds."""
MAX_RERUNS = 3_000
"""On the menu; the program has three to four columns for each."""
MAX_ROUNDS = 4
"""Times that overflowing moments get an allowance."""


def recombine(search: Search, *, base: int) -> None:
    """Offer the best schedule from the search's menu; base: the moment that binds.

    Nothing happens where the menu is too long for a program that can be solved.
    """
    folded, budget_bytes = search.folded, search.budget_bytes
    if len(search.menu) > MAX_RERUNS:
        return
    moments = _moments(folded, search.menu, base=base, budget_bytes=budget_bytes)
    allowance_bytes: dict[int, int] = {}
    before: FoldedSimulation | None = None
    for _ in range(MAX_ROUNDS):
        menu = Menu(
            folded,
            moments=moments,
            reruns=search.menu,
            base=base,
            budget_bytes=budget_bytes,
            allowance_bytes=allowance_bytes,
            deadline=search.deadline,
        )
        if search.done:
            return
        guide = menu.solve(below=search.best_share)
        if guide is None:
            return
        played = search.offer(schedule_from_cuts(folded, guide, deadline=search.deadline))
        if played is None or played.simulation.peak_bytes <= budget_bytes:
            return
        if before is not None and played.stage_bytes == before.stage_bytes:
            return
        before = played
        _allow(played, budget_bytes, moments, allowance_bytes)


def _moments(
    folded: FoldedGraph, reruns: Iterable[tuple[int, int]], *, base: int, budget_bytes: int
) -> list[int]:
    """Where something on the menu runs again, and where the baseline would overflow."""
    full = {p for p in range(folded.n_nodes) if folded.baseline_bytes[p] > budget_bytes}
    places = {q for _, p in reruns for q in (p - 1, p) if q >= 0}
    first = min(folded.n_forward, base)
    return sorted({p for p in full | places if p >= first} | {base})


def _allow(
    played: FoldedSimulation, budget_bytes: int, moments: list[int], allowance_bytes: dict[int, int]
) -> None:
    """Where the judge saw an overflow, leave that many bytes free."""
    for p, live_bytes in enumerate(played.stage_bytes):
        if live_bytes > budget_bytes:
            k = min(bisect_left(moments, p), len(moments) - 1)
            for moment in moments[max(0, k - 1) : k + 1]:  # what runs again is between the two
                more = allowance_bytes.get(moment, 0) + live_bytes - budget_bytes
                allowance_bytes[moment] = more


@dataclass
class Menu:
    """The program of the module. keep, rerun: columns by moment, of units and of nodes.

    Raises OutOfTimeError while it is built.
    """

    folded: FoldedGraph
    moments: Sequence[int]
    reruns: Iterable[tuple[int, int]]
    base: int
    budget_bytes: int
    allowance_bytes: Mapping[int, int]
    deadline: Deadline = NEVER
    program: Milp = field(init=False)
    keep: list[dict[int, int]] = field(default_factory=list, init=False)
    rerun: list[dict[int, int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        folded = self.folded
        self._baseline_s = folded.graph.baseline_time_s or 1.0
        self.program = Milp(constant=folded.graph.baseline_time_s / self._baseline_s)
        self._scale = float(max(folded.unit_bytes, default=0) or 1)
        allowed: list[set[int]] = [set() for _ in self.moments]
        for n, p in self.reruns:
            k = max(0, bisect_left(self.moments, p) - 1)
            if n < self.moments[k]:
                allowed[k].add(n)
        for k, needed in enumerate(self._needed(allowed)):
            self._add_moment(k, needed, allowed[k])
        self._add_total(self.moments.index(self.base))

    def _end(self, k: int) -> int:
        return self.moments[k + 1] if k + 1 < len(self.moments) else self.folded.n_nodes + 1

    def _needed(self, allowed: Sequence[set[int]]) -> list[list[int]]:
        """By moment, the forward units that a first run or a rerun may still read."""
        folded = self.folded
        read_again: set[int] = set()
        found = []
        for k in reversed(range(len(self.moments))):
            self.deadline.check()
            p = self.moments[k]
            read_again.update(u for n in allowed[k] for u in folded.reads[n])
            made = min(p, folded.n_forward)
            found.append(
                [
                    u
                    for u, uses in enumerate(folded.uses)
                    if folded.maker[u] < made and uses and (uses[-1] >= p or u in read_again)
                ]
            )
        return found[::-1]

    def _add_moment(self, k: int, needed: Sequence[int], allowed: Iterable[int]) -> None:
        self.deadline.check()
        folded, program, p = self.folded, self.program, self.moments[k]
        before_keep = self.keep[-1] if k else {}
        before_rerun = self.rerun[-1] if k else {}
        touched = self._touched(k - 1) if k else set()
        keep: dict[int, int] = {}
        for u in needed:
            sure = p in folded.uses[u] or folded.is_pinned(u, p) or not folded.unit_bytes[u]
            if u in before_keep and u not in touched:
                keep[u] = before_keep[u]
                program.least[keep[u]] = max(program.least[keep[u]], float(sure))
            else:
                keep[u] = program.variable(least=float(sure))
        rerun = {
            n: program.variable(cost=folded.time_s[n] / self._baseline_s) for n in sorted(allowed)
        }
        for u, column in keep.items():
            if u in before_keep and column != before_keep[u]:
                self._cover(u, before_keep, before_rerun, column)
        self.keep.append(keep)
        self.rerun.append(rerun)
        for u in keep:
            if p not in folded.uses[u] and any(p < use < self._end(k) for use in folded.uses[u]):
                self._cover(u, keep, rerun, None)
        for n, column in rerun.items():
            for u in folded.reads[n]:
                self._cover(u, keep, rerun, column)
        self._add_bytes(p, keep)

    def _touched(self, k: int) -> set[int]:
        """Units that something reads or makes from p_k up to the next moment."""
        folded = self.folded
        touched = {
            u for n in self.rerun[k] for units in (folded.reads[n], folded.makes[n]) for u in units
        }
        for p in range(self.moments[k], min(self._end(k), folded.n_nodes)):
            touched.update(folded.reads[p])
            touched.update(folded.makes[p])
        return touched

    def _cover(
        self, u: int, keep: Mapping[int, int], rerun: Mapping[int, int], reader: int | None
    ) -> None:
        """Unit u is there or made again, if its reader's column is 1 (None: in any case)."""
        columns, values = [keep[u]], [1.0]
        maker = self.folded.maker[u]
        if maker in rerun:
            columns.append(rerun[maker])
            values.append(1.0)
        if reader is not None:
            columns.append(reader)
            values.append(-1.0)
        self.program.row(columns, values, lower=1.0 if reader is None else 0.0)

    def _add_bytes(self, p: int, keep: Mapping[int, int]) -> None:
        folded = self.folded
        room = self.budget_bytes - self.allowance_bytes.get(p, 0)
        room -= int(folded.held_bytes[p]) + int(folded.own_bytes[p])
        counted = [u for u in keep if folded.unit_bytes[u] and not folded.is_pinned(u, p)]
        self.program.row(
            [keep[u] for u in counted],
            [folded.unit_bytes[u] / self._scale for u in counted],
            upper=room / self._scale,
        )

    def _add_total(self, k: int) -> None:
        """The single cut's rows at p_k: a unit or node serves all spans after it together."""
        folded, program, p, keep = self.folded, self.program, self.moments[k], self.keep[k]
        made = min(p, folded.n_forward)
        spans: dict[int, list[int]] = {}
        for rerun in self.rerun[k:]:
            for n, column in rerun.items():
                if n < made:
                    spans.setdefault(n, []).append(column)
        total: dict[int, int] = {}
        for n, columns in spans.items():
            if len(columns) == 1:
                total[n] = columns[0]
                continue
            total[n] = program.variable()
            program.row([*columns, total[n]], [*(1.0 for _ in columns), -1.0], lower=0.0)
            for column in columns:
                program.row([total[n], column], [1.0, -1.0], lower=0.0)
        for u in keep:
            if p not in folded.uses[u] and any(use > p for use in folded.uses[u]):
                self._cover(u, keep, total, None)
        for n, column in total.items():
            for u in folded.reads[n]:
                self._cover(u, keep, total, column)

    def solve(self, *, below: float) -> dict[int, frozenset[int]] | None:
        """By moment, the units that the best solution found holds; None: none found.

        below: the time lost must be less, as a share of the baseline's; it prunes the search.
        """
        program = self.program
        if math.isfinite(below):
            program.row(list(range(len(program.cost))), program.cost, upper=below - GAP)
        answer = program.solve(
            whole=True,
            gap=GAP,
            node_limit=max(1, NODES_TIMES_COLUMNS // max(1, len(program.cost))),
            deadline=self.deadline,
        )
        values = answer.values
        if values is None:
            return None
        return {
            p: frozenset(u for u, column in keep.items() if values[column] > 0.5)
            for p, keep in zip(self.moments, self.keep, strict=True)
        }
