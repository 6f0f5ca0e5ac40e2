"""Moments of the step, and the least time that any schedule must lose because of them.

**One cut.** Stand at the moment at which node p runs for the first time. By the two facts of
`solver.bound.folded`, the device then holds everything pinned, the inputs of p beside its outputs
and workspace, and of the other forward units made so far some set S. What S lacks of that which
later first runs (or the end) read, is made again after this moment, with whatever is missing for
that in turn. So over all schedules within the budget the time lost is at least

    minimise    sum of time_s[n] * r[n]
    subject to  x[u] + r[maker(u)] >= 1          for each unit u that a node > p or the end reads
                x[v] + r[maker(v)] >= r[n]       for each unit v that n reads
                sum of bytes[u] * x[u] <= budget - bytes that are there anyway
                x[u] = 1 where p reads u; r[n] = 0 where n may not run again, or never fits

over x[u] (u is on the device at p) and r[n] (n runs again after p), both binary.

**Several cuts.** At moments p_1 < ... < p_K there are x[u,k] and r[n,k] (n runs again between p_k
and p_{k+1}, or the end), each with the rows above for the first runs between p_k and p_{k+1}, and

                x[u,k+1] <= x[u,k] + r[maker(u),k]   for each unit u made before p_k

so that what is there at a moment was there at the one before or was made again in between. One
budget row per moment. A relaxation of these rows alone would be weaker than a single cut's: half a
unit can serve half a rerun in each of two spans. So R[n,k], n runs again at least once after p_k,

                r[n,k], R[n,k+1] <= R[n,k] <= r[n,k] + R[n,k+1]

takes the place of r in the rows of a single cut at p_k; then several cuts bound at least as well as
each of theirs alone, and the search ends ten times sooner. This is Checkmate (Jain et al. 2020)
with the step coarsened to the moments that matter and the recomputation in between left free, hence
a relaxation.

**Why it bounds every legal schedule.** Take one whose peak is within the budget. Let x[.,k] be what
it has on the device while p_k runs, r[.,k] the nodes that it runs again between the two moments.
First row: the reader's run needs the unit, so it was there all along or was made after p_k, and its
maker's first run lies before p_k. Second row: the same for the rerun's inputs; v was made before
p_k as well, since n was. Byte row: the judge's count while p_k runs, from which things are only
left out. r[n,k] = 0 where n cannot fit even beside what every schedule holds
(`FoldedGraph.may_recompute`). Reruns cost their time on top of the baseline's, and r counts each
node at most once in each span. Nothing is assumed about the order of recomputation, about the
forward pass, or about outputs of the forward pass staying (they too may be dropped and made again).
Moments of the forward pass serve as well. Units of size zero cost nothing to keep, so x = 1 for
them.

Bytes are scaled to the largest unit, times to the baseline, and every bound gives away TIME_ERROR
of the baseline for the solver's tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from solver.bound.folded import FoldedGraph
from solver.bound.milp import Answer, Milp
from solver.common import NEVER, Deadline, OutOfTimeError

TIME_ERROR = 1e-6
"""The solver's tolerance on the objective as a share of the baseline: every bound gives it away."""
NODES_TIMES_COLUMNS_SQUARED = 10**9
"""Branch-and-bound nodes of one solve times its columns squared, as a node costs more than its
columns: ten seconds at most.
"""
ROUNDED_GAP = 2.5e-4
"""Where the LP of a single cut rounds to within this share of the baseline's time, that will do."""


@dataclass(frozen=True)
class Cuts:
    """The cuts at these moments, solved.

    lost_share: recompute time that no schedule within the budget avoids, as a share of the
    baseline's (inf: nothing fits); it means that only if no allowance was made. kept: by moment,
    the units that the solution holds (None: no solution found). cost_share: what the solution loses
    (inf: not known).
    """

    positions: tuple[int, ...]
    lost_share: float
    kept: tuple[frozenset[int], ...] | None
    timed_out: bool = False
    cost_share: float = math.inf


class CutMilp:
    """The program of the cuts at the given moments, in order."""

    def __init__(
        self,
        folded: FoldedGraph,
        *,
        positions: Sequence[int],
        budget_bytes: int,
        allowance_bytes: Mapping[int, int] | None = None,
        deadline: Deadline = NEVER,
    ) -> None:
        """allowance_bytes: by moment, bytes that the solution may not use beyond what the proof
        asks; given when the schedule that follows the solution would overflow there.

        Raises OutOfTimeError while it is built.
        """
        self.folded = folded
        self.positions = tuple(positions)
        self.budget_bytes = budget_bytes
        self._allowance_bytes = allowance_bytes or {}
        self._deadline = deadline
        baseline_s = folded.graph.baseline_time_s or 1.0
        self.program = Milp(constant=folded.graph.baseline_time_s / baseline_s)
        self._time_share = [time_s / baseline_s for time_s in folded.time_s]
        self._scale = float(max(folded.unit_bytes, default=0) or 1)
        self.keep: list[dict[int, int]] = []
        self.rerun: list[dict[int, int]] = []
        for k in range(len(self.positions)):
            self._add_moment(k)
        recomputable = dict(self.rerun[-1]) if self.rerun else {}
        for k in reversed(range(len(self.positions) - 1)):
            recomputable = self._add_total(k, recomputable)

    @property
    def n_columns(self) -> int:
        return len(self.program.cost)

    def hold(self, units: Set[int]) -> None:
        """Have these on the device at every moment at which they matter: proves nothing more."""
        for keep in self.keep:
            for u in keep.keys() & units:
                self.program.least[keep[u]] = 1.0

    def _add_moment(self, k: int) -> None:
        self._deadline.check()
        folded, p = self.folded, self.positions[k]
        end = self.positions[k + 1] if k + 1 < len(self.positions) else folded.n_nodes + 1
        needed, through = self._closure(p)
        here = {u for u in needed if p in folded.uses[u]}
        keep: dict[int, int] = {}
        for u in sorted(needed):
            sure = u in here or folded.is_pinned(u, p) or folded.unit_bytes[u] == 0
            keep[u] = self.program.variable(least=float(sure))
        now = folded.may_recompute(after=p, before=end, budget_bytes=self.budget_bytes)
        rerun = {
            n: self.program.variable(cost=self._time_share[n]) for n in sorted(through) if now[n]
        }
        for u in keep.keys() - here:
            if any(p < use < end for use in folded.uses[u]):
                self._cover(u, keep, rerun, ())
        for n, column in rerun.items():
            for u in folded.reads[n]:
                self._cover(u, keep, rerun, (column,))
        if k:
            before_keep, before_rerun = self.keep[-1], self.rerun[-1]
            for u, column in keep.items():
                if u in before_keep:
                    self._cover(u, before_keep, before_rerun, (column,))
        self._add_bytes(p, keep)
        self.keep.append(keep)
        self.rerun.append(rerun)

    def _add_total(self, k: int, after: Mapping[int, int]) -> dict[int, int]:
        """R[n,k] by node, from R[n,k+1] (`after`), with the rows of a single cut at p_k."""
        folded, p, keep, rerun = self.folded, self.positions[k], self.keep[k], self.rerun[k]
        made = min(p, folded.n_forward)
        total: dict[int, int] = {}
        for n in sorted(n for n in {*rerun, *after} if n < made):
            parts = [columns[n] for columns in (rerun, after) if n in columns]
            if len(parts) == 1:
                total[n] = parts[0]
                continue
            total[n] = self.program.variable()
            self.program.row([*parts, total[n]], [1.0, 1.0, -1.0], lower=0.0)
            for part in parts:
                self.program.row([total[n], part], [1.0, -1.0], lower=0.0)
        for u in keep:
            if p not in folded.uses[u] and any(use > p for use in folded.uses[u]):
                self._cover(u, keep, total, ())
        for n, column in total.items():
            for u in folded.reads[n]:
                self._cover(u, keep, total, (column,))
        return total

    def _closure(self, p: int) -> tuple[set[int], set[int]]:
        """Units that may matter at p (read later, or by what may run again) and those nodes."""
        folded = self.folded
        made = min(p, folded.n_forward)
        may = folded.may_recompute(
            after=p, before=folded.n_nodes + 1, budget_bytes=self.budget_bytes
        )
        needed = {
            u
            for u, positions in enumerate(folded.uses)
            if positions and folded.maker[u] < made and positions[-1] >= p
        }
        through: set[int] = set()
        for n in range(made - 1, -1, -1):
            if may[n] and not needed.isdisjoint(folded.makes[n]):
                through.add(n)
                needed.update(folded.reads[n])
        return needed, through

    def _cover(
        self, u: int, keep: Mapping[int, int], rerun: Mapping[int, int], readers: tuple[int, ...]
    ) -> None:
        """Unit u is kept or made again, if its reader is there (no reader: in any case)."""
        columns = [keep[u], *readers]
        values = [1.0, *(-1.0 for _ in readers)]
        maker = self.folded.maker[u]
        if maker in rerun:
            columns.append(rerun[maker])
            values.append(1.0)
        self.program.row(columns, values, lower=0.0 if readers else 1.0)

    def _add_bytes(self, p: int, keep: Mapping[int, int]) -> None:
        folded, room = self.folded, self._room(p)
        counted = self._counted(keep, p)
        for u in counted:
            # Said outright: the solver's tolerance on a row of gigabytes lets some bytes pass.
            if folded.unit_bytes[u] > room and not self.program.least[keep[u]]:
                self.program.most[keep[u]] = 0.0
        self.program.row(
            [keep[u] for u in counted],
            [folded.unit_bytes[u] / self._scale for u in counted],
            upper=room / self._scale,
        )

    def _counted(self, units: Iterable[int], p: int) -> list[int]:
        """Those of the units that the row of bytes at p counts."""
        folded = self.folded
        return [u for u in units if not folded.is_pinned(u, p) and folded.unit_bytes[u]]

    def _within_room(self, units: frozenset[int], p: int) -> frozenset[int]:
        """Without the smallest units that make up for what the solver's tolerance let pass."""
        counted = sorted(self._counted(units, p), key=lambda u: (self.folded.unit_bytes[u], u))
        over = sum(self.folded.unit_bytes[u] for u in counted) - self._room(p)
        dropped: set[int] = set()
        for u in counted:
            if over <= 0:
                break
            if p not in self.folded.uses[u]:
                dropped.add(u)
                over -= self.folded.unit_bytes[u]
        return units - dropped

    def _room(self, p: int) -> int:
        """Bytes left for the units at this moment that are not pinned."""
        room = self.budget_bytes - self._allowance_bytes.get(p, 0)
        return room - int(self.folded.held_bytes[p]) - int(self.folded.own_bytes[p])

    def read(self, answer: Answer) -> Cuts:
        """The cuts from the solver's answer; an LP's shares are rounded."""
        kept, cost_share = None, math.inf
        if answer.values is not None:
            values = answer.values
            kept = tuple(
                self._within_room(
                    frozenset(u for u, column in keep.items() if values[column] > 0.5), p
                )
                for p, keep in zip(self.positions, self.keep, strict=True)
            )
            cost_share = float(np.dot(self.program.cost, values))
        lost = answer.bound - self.program.constant - TIME_ERROR
        return Cuts(
            positions=self.positions,
            lost_share=max(0.0, lost),
            kept=kept,
            timed_out=answer.timed_out,
            cost_share=cost_share,
        )

    def rounded(self, answer: Answer) -> Cuts:
        """A whole solution of a single cut near the LP's: units by their shares while bytes last.

        A vertex of this LP has few shares between 0 and 1, mostly of one block out of many equal
        ones, on which a MILP search would spend a minute. cost_share: inf where a unit that did not
        get in cannot be made again.
        """
        (keep,), (rerun,), (p,) = self.keep, self.rerun, self.positions
        lost_share = max(0.0, answer.bound - self.program.constant - TIME_ERROR)
        if answer.values is None:
            return Cuts(self.positions, lost_share, None, timed_out=answer.timed_out)
        folded, shares = self.folded, answer.values
        room = self._room(p)
        kept: set[int] = set()
        for u in sorted(keep, key=lambda u: (-shares[keep[u]], u)):
            size_bytes = 0 if folded.is_pinned(u, p) else folded.unit_bytes[u]
            if shares[keep[u]] > TIME_ERROR and size_bytes <= room:
                kept.add(u)
                room -= size_bytes
        missing = [u for u in keep if u not in kept and any(use > p for use in folded.uses[u])]
        recomputable: set[int] = set()
        while missing:
            maker = folded.maker[missing.pop()]
            if maker not in recomputable:
                recomputable.add(maker)
                missing += [u for u in folded.reads[maker] if u not in kept]
        possible = recomputable <= rerun.keys() and all(
            u in kept for u in keep if p in folded.uses[u]
        )
        return Cuts(
            positions=self.positions,
            lost_share=lost_share,
            kept=(frozenset(kept),),
            cost_share=math.fsum(self._time_share[n] for n in recomputable)
            if possible
            else math.inf,
            timed_out=answer.timed_out,
        )


def solve_cuts(
    folded: FoldedGraph,
    *,
    positions: Sequence[int],
    budget_bytes: int,
    whole: bool,
    allowance_bytes: Mapping[int, int] | None = None,
    gap: float = 5e-4,
    node_limit: int = 10_000,
    deadline: Deadline = NEVER,
) -> Cuts:
    """The cuts at these moments as one LP (milliseconds) or, `whole`, as a MILP.

    gap: the MILP stops when its bound is within this share of the baseline's time. For a single cut
    it is not even begun where the LP rounds to within that or ROUNDED_GAP.
    deadline: past it nothing is proven, and timed_out.
    """
    try:
        program = CutMilp(
            folded,
            positions=positions,
            budget_bytes=budget_bytes,
            allowance_bytes=allowance_bytes,
            deadline=deadline,
        )
    except OutOfTimeError:
        return Cuts(tuple(positions), 0.0, None, timed_out=True)
    affordable = NODES_TIMES_COLUMNS_SQUARED // max(1, program.n_columns) ** 2
    if whole and len(positions) == 1:
        cuts = program.rounded(program.program.solve(whole=False, deadline=deadline))
        close = cuts.cost_share - cuts.lost_share <= max(gap, ROUNDED_GAP)
        if close or math.isinf(cuts.lost_share) or not affordable:
            return cuts
    answer = program.program.solve(
        whole=whole, gap=gap, node_limit=min(node_limit, max(1, affordable)), deadline=deadline
    )
    return program.read(answer)
