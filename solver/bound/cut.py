"""Cuts: positions of the step, and the least time that any schedule must lose because of them.

**One cut.** Consider the position at which node p is computed for the first time. By the facts in
`solver.bound.storage_graph`, the device then holds everything pinned, the inputs, outputs and
workspace of p, and some set S of the other forward units made so far. Units outside S that later
first computations (or the end) read are recomputed after this position, and recursively so are
missing inputs of these. So over all schedules within the budget the time lost is at least

    minimise    sum of time_s[n] * r[n]
    subject to  x[u] + r[maker(u)] >= 1          for each unit u that a node > p or the end reads
                x[v] + r[maker(v)] >= r[n]       for each unit v that n reads
                sum of bytes[u] * x[u] <= budget - bytes that are held in any case
                x[u] = 1 where p reads u; r[n] = 0 where n is not recomputable, or never fits

over x[u] (u is on the device at p) and r[n] (n is recomputed after p), both binary.

**Several cuts.** At positions p_1 < ... < p_K there are x[u,k] and r[n,k] (n is recomputed between
p_k and p_{k+1}, or the end), each with the rows above for the first computations between p_k and
p_{k+1}, and

                x[u,k+1] <= x[u,k] + r[maker(u),k]   for each unit u made before p_k

so a unit on the device at a position was there at the previous one or was recomputed in between. If
nothing between the two may read or make u, x[u,k+1] and x[u,k] are one column: what is dropped
there could as well have been dropped before. There is one byte row per position. The LP of these
rows alone would prove less than a single cut's: half a unit can serve half a recomputation in each
of two spans. So R[n,k], n is recomputed at least once after p_k,

                r[n,k], R[n,k+1] <= R[n,k] <= r[n,k] + R[n,k+1]

takes the place of r in the rows of a single cut at p_k. Then several cuts bound at least as well as
each of them alone, and the search ends ten times sooner. This is Checkmate (Jain et al. 2020),
relaxed: only the positions that matter, with the recomputation in between left free.

**Why it bounds every legal schedule.** Take one whose peak is within the budget. Let x[.,k] be what
it has on the device while p_k runs, r[.,k] the nodes that it recomputes between the two positions.
First row: the reader needs the unit, so it was there at p_k or was made after p_k, by its maker,
whose first computation is before p_k. Second row: the same for the inputs of what is recomputed; v
was made before p_k as well, since n was. Byte row: it counts a part of what the simulator counts
while p_k runs. r[n,k] = 0 where n cannot fit even beside what every schedule holds
(`StorageGraph.may_recompute`). Recomputation adds its time to the baseline's, and r counts each
node at most once in each span. Nothing is assumed about the order of recomputation, about the
forward pass, or about outputs of the forward pass staying (they too may be dropped and recomputed).
Positions may be in the forward pass too. Units of size zero cost nothing to keep: x = 1.

Bytes are scaled to the largest unit and times to the baseline. TIME_ERROR of the baseline is
subtracted from every bound because of the solver's tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from solver.bound.milp import Answer, Floats, Milp
from solver.bound.storage_graph import StorageGraph
from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError

TIME_ERROR = 1e-6
"""The solver's tolerance on the objective, as a share of the baseline: taken off every bound."""
ROUNDED_GAP = 2.5e-4
"""If a single cut's LP rounds to within this share of the baseline's time, no MILP is solved."""
NODES_BEFORE_COUNTS, LEAST_EQUAL_COLUMNS = 100, 3
"""After so many nodes on a single cut, kinds that occur at least so often are counted."""


@dataclass(frozen=True)
class Cuts:
    """The solution of the cuts at these positions.

    lost_share: recompute time that no schedule within the budget avoids, as a share of the
        baseline's (inf: nothing fits); proven only if no allowance was made.
    kept: by position, the units on the device in the solution (None: no solution found).
    cost_share: what the solution loses (inf: not known).
    """

    positions: tuple[int, ...]
    lost_share: float
    kept: Mapping[int, frozenset[int]] | None
    timed_out: bool = False
    cost_share: float = math.inf


class CutMilp:
    """The MILP of the cuts at the given positions, which are in ascending order.

    keep, recompute: by position, the columns x of units and r of nodes.
    """

    def __init__(
        self,
        folded: StorageGraph,
        *,
        positions: Sequence[int],
        budget_bytes: int,
        allowance_bytes: Mapping[int, int] | None = None,
        deadline: Deadline = NEVER,
    ) -> None:
        """Build the program. Raises OutOfTimeError if the deadline passes meanwhile.

        allowance_bytes: by position, bytes to take from the budget, because the schedule made from
            the solution would exceed it there. The result is then no bound.
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
        self.recompute: list[dict[int, int]] = []
        self.fetch: dict[int, int] = {}  # by unit, the column h of `solver.bound.copies`
        for k, (units, nodes) in enumerate(self._candidates()):
            self._deadline.check()
            self._add_position(k, units, nodes)
        self._add_totals()

    @property
    def n_columns(self) -> int:
        return len(self.program.cost)

    def keep_everywhere(self, units: Set[int]) -> None:
        """Keep these units at every position where they matter. The result is then no bound."""
        for keep in self.keep:
            for u in keep.keys() & units:
                self.program.least[keep[u]] = 1.0

    def count_equal_columns(self) -> None:
        """Add variables that count, by position, equal units kept and equal nodes recomputed."""
        folded = self.folded
        kinds: dict[tuple[int, str, float, int | None], dict[int, None]] = {}
        for k, (keep, recompute) in enumerate(zip(self.keep, self.recompute, strict=True)):
            found = [(folded.maker[u], folded.unit_bytes[u], keep[u]) for u in keep]
            for n, size_bytes, column in [*found, *((n, None, recompute[n]) for n in recompute)]:
                kind = k, folded.graph.nodes[n].op, folded.time_s[n], size_bytes
                kinds.setdefault(kind, {})[column] = None  # positions share columns
        for columns in dict.fromkeys(map(tuple, kinds.values())):
            if len(columns) >= LEAST_EQUAL_COLUMNS:
                self.program.add_count_of([*columns])

    def _candidates(self) -> Iterator[tuple[Iterable[int], Iterable[int]]]:
        """Yield, for each position, units that may matter there and nodes that may be recomputed.

        Such units are read later, or by what may be recomputed; the nodes may be recomputed between
        this position and the next.
        """
        folded = self.folded
        for k, p in enumerate(self.positions):
            n_run = min(p, folded.n_forward)
            may_later, may_now = (
                folded.may_recompute(after=p, before=before, budget_bytes=self.budget_bytes)
                for before in (folded.n_nodes + 1, self._end(k))
            )
            units = {
                u
                for u, uses in enumerate(folded.uses)
                if uses and folded.maker[u] < n_run and uses[-1] >= p
            }
            nodes = []
            for n in range(n_run - 1, -1, -1):
                if may_later[n] and not units.isdisjoint(folded.makes[n]):
                    units.update(folded.reads[n])
                    if may_now[n]:
                        nodes.append(n)
            yield units, nodes

    def _end(self, k: int) -> int:
        return self.positions[k + 1] if k + 1 < len(self.positions) else self.folded.n_nodes + 1

    def _add_position(self, k: int, units: Iterable[int], nodes: Iterable[int]) -> None:
        folded, program, p = self.folded, self.program, self.positions[k]
        before = self.keep[-1] if k else {}
        touched: set[int] = set()  # units that may be read or made since the previous position
        if k:
            for n in (*self.recompute[-1], *range(self.positions[k - 1], min(p, folded.n_nodes))):
                touched.update(folded.reads[n], folded.makes[n])
        keep: dict[int, int] = {}
        for u in sorted(units):
            must_keep = p in folded.uses[u] or folded.is_pinned(u, p) or not folded.unit_bytes[u]
            if u in before and u not in touched:
                keep[u] = before[u]
                program.least[keep[u]] = max(program.least[keep[u]], float(must_keep))
            else:
                keep[u] = program.variable(least=float(must_keep))
        self._add_fetch_columns(p, keep)
        recompute = {n: program.variable(cost=self._time_share[n]) for n in sorted(nodes)}
        for u, column in keep.items():
            if u in before and column != before[u]:
                self._cover(u, before, self.recompute[-1], (column,))
        due = (u for u in keep if any(p < use < self._end(k) for use in folded.uses[u]))
        self._cover_all(due, p, keep, recompute)
        self._add_bytes(p, keep)
        self.keep.append(keep)
        self.recompute.append(recompute)

    def _add_fetch_columns(self, p: int, keep: Mapping[int, int]) -> None:
        """Add no columns: nothing is in host memory in a step without copies."""

    def _add_totals(self) -> None:
        """Add the columns R[n,k], from R[n,k+1], with the rows of a single cut at p_k."""
        after = self.recompute[-1] if self.recompute else {}
        for k in reversed(range(len(self.positions) - 1)):
            parts = [self.recompute[k], after]
            nodes = {*self.recompute[k], *after}
            after = self._add_total(k, {n: [part[n] for part in parts if n in part] for n in nodes})

    def _add_total(self, k: int, parts: Mapping[int, list[int]]) -> dict[int, int]:
        """By node, a column that is 1 if any of its parts is, with the rows of a single cut at p_k.

        In these rows each unit and recomputation serves all later spans together.
        """
        folded, p, keep = self.folded, self.positions[k], self.keep[k]
        total: dict[int, int] = {}
        for n in sorted(n for n in parts if n < min(p, folded.n_forward)):
            if len(parts[n]) == 1:
                total[n] = parts[n][0]
                continue
            total[n] = self.program.variable()
            self.program.row([*parts[n], total[n]], [1.0] * len(parts[n]) + [-1.0], lower=0.0)
            for part in parts[n]:
                self.program.row([total[n], part], [1.0, -1.0], lower=0.0)
        due = (u for u in keep if any(use > p for use in folded.uses[u]))
        self._cover_all(due, p, keep, total)
        return total

    def _cover_all(
        self, due: Iterable[int], p: int, keep: Mapping[int, int], recompute: Mapping[int, int]
    ) -> None:
        """Add the rows of units in `due`, needed in any case, and of inputs of recomputed nodes."""
        for u in due:
            if p not in self.folded.uses[u]:
                self._cover(u, keep, recompute, ())
        for n, column in recompute.items():
            for u in self.folded.reads[n]:
                self._cover(u, keep, recompute, (column,))

    def _cover(
        self, u: int, keep: Mapping[int, int], rerun: Mapping[int, int], readers: tuple[int, ...]
    ) -> None:
        """Unit u is kept, fetched or recomputed if the reader's column is 1 (no reader: always)."""
        maker = self.folded.maker[u]
        columns = [keep[u]]
        columns += [self.fetch[u]] if u in self.fetch else []
        columns += [rerun[maker]] if maker in rerun else []
        values = [1.0] * len(columns) + [-1.0] * len(readers)
        self.program.row([*columns, *readers], values, lower=0.0 if readers else 1.0)

    def _add_bytes(self, p: int, keep: Mapping[int, int]) -> None:
        room, size_bytes = self.room_bytes(p), self.counted_bytes(keep, p)
        for column, each in size_bytes.items():
            # Excluded explicitly: the solver's tolerance on a row of gigabytes lets bytes pass.
            if each > room and not self.program.least[column]:
                self.program.most[column] = 0.0
        self.add_byte_row(size_bytes, room)

    def add_byte_row(self, size_bytes: Mapping[int, int], room_bytes: int) -> None:
        """Add the row: these columns, of so many bytes each, fit into the room."""
        values = [each / self._scale for each in size_bytes.values()]
        self.program.row([*size_bytes], values, upper=room_bytes / self._scale)

    def counted_bytes(self, keep: Mapping[int, int], p: int) -> dict[int, int]:
        """By column, the bytes of those units that the byte row at p counts."""
        return {keep[u]: self.folded.unit_bytes[u] for u in self._counted_units(keep, p)}

    def _counted_units(self, units: Iterable[int], p: int) -> list[int]:
        folded = self.folded
        return [u for u in units if not folded.is_pinned(u, p) and folded.unit_bytes[u]]

    def _within_room(self, units: frozenset[int], p: int) -> frozenset[int]:
        """Drop the smallest units if the solver's tolerance let more pass than the room holds."""
        size_bytes = self.folded.unit_bytes
        counted = sorted(self._counted_units(units, p), key=lambda u: (size_bytes[u], u))
        over_bytes = sum(size_bytes[u] for u in counted) - self.room_bytes(p)
        dropped: set[int] = set()
        for u in counted:
            if over_bytes <= 0:
                break
            if p not in self.folded.uses[u]:
                dropped.add(u)
                over_bytes -= size_bytes[u]
        return units - dropped

    def room_bytes(self, p: int) -> int:
        """Bytes left at position p for units that are not pinned."""
        room = self.budget_bytes - self._allowance_bytes.get(p, 0)
        return room - int(self.folded.held_bytes[p]) - int(self.folded.own_bytes[p])

    def kept_units(self, values: Floats) -> dict[int, frozenset[int]]:
        """By position, the units on the device in a solution; an LP's fractions are rounded."""
        return {
            p: frozenset(u for u, column in keep.items() if values[column] > 0.5)
            for p, keep in zip(self.positions, self.keep, strict=True)
        }

    def to_cuts(self, answer: Answer) -> Cuts:
        """Turn the solver's answer into Cuts."""
        kept, cost_share = None, math.inf
        if answer.values is not None:
            found = self.kept_units(answer.values)
            kept = {p: self._within_room(units, p) for p, units in found.items()}
            cost_share = float(np.dot(self.program.cost, answer.values))
        lost_share = self.lost_share(answer)
        return Cuts(self.positions, lost_share, kept, answer.timed_out, cost_share)

    def lost_share(self, answer: Answer) -> float:
        return max(0.0, answer.bound - self.program.constant - TIME_ERROR)

    def solve_lp_and_round(self) -> Cuts:
        """An integer solution of a single cut: units by their LP fractions, while bytes last.

        A vertex of this LP has few fractions, mostly of one block out of many equal ones, on which
        a MILP search would spend a minute. cost_share: inf if a unit left out cannot be recomputed.
        """
        (keep,), (recompute,), (p,) = self.keep, self.recompute, self.positions
        answer = self.program.solve(as_milp=False, deadline=self._deadline)
        lost_share = self.lost_share(answer)
        if answer.values is None:
            return Cuts(self.positions, lost_share, None, timed_out=answer.timed_out)
        folded, kept = self.folded, self.units_by_share(answer.values)
        read_later = (u for u in keep if any(use > p for use in folded.uses[u]))
        needed = folded.nodes_to_make(read_later, is_there=kept.__contains__)
        is_possible = needed <= recompute.keys() and all(
            u in kept for u in keep if p in folded.uses[u]
        )
        cost_share = math.fsum(self._time_share[n] for n in needed) if is_possible else math.inf
        return Cuts(self.positions, lost_share, {p: kept}, answer.timed_out, cost_share)

    def units_by_share(self, shares: Floats) -> frozenset[int]:
        """Units of a single cut, by their fractions, the largest first, while bytes last."""
        (keep,), (p,) = self.keep, self.positions
        room, kept = self.room_bytes(p), set()
        for u in sorted(keep, key=lambda u: (-shares[keep[u]], u)):
            size_bytes = 0 if self.folded.is_pinned(u, p) else self.folded.unit_bytes[u]
            if shares[keep[u]] > TIME_ERROR and size_bytes <= room:
                kept.add(u)
                room -= size_bytes
        return frozenset(kept)


def solve_cuts(
    folded: StorageGraph,
    *,
    positions: Sequence[int],
    budget_bytes: int,
    as_milp: bool,
    gap: float = 5e-4,
    node_limit: int = 10_000,
    deadline: Deadline = NEVER,
) -> Cuts:
    """Solve the cuts at these positions as one LP (milliseconds) or, if `as_milp`, as a MILP.

    gap: the MILP stops when its bound is within this share of the baseline's time. For a single cut
        it is skipped if the LP rounds to within the larger of that and ROUNDED_GAP.
    deadline: ends the search; timed_out is then set, and what is proven by then counts.
    """
    try:
        program = CutMilp(folded, positions=positions, budget_bytes=budget_bytes, deadline=deadline)
    except OutOfTimeError:
        return Cuts(tuple(positions), 0.0, None, timed_out=True)
    affordable = program.program.n_affordable_nodes
    n_nodes = most_nodes = min(node_limit, max(1, affordable))
    if as_milp and len(positions) == 1:
        cuts = program.solve_lp_and_round()
        is_close = cuts.cost_share - cuts.lost_share <= max(gap, ROUNDED_GAP)
        if is_close or math.isinf(cuts.lost_share) or not affordable:
            return cuts
        n_nodes = min(most_nodes, NODES_BEFORE_COUNTS)

    def solve_up_to(n: int) -> Cuts:
        answer = program.program.solve(as_milp=as_milp, gap=gap, node_limit=n, deadline=deadline)
        return program.to_cuts(answer)

    cuts = solve_up_to(n_nodes)
    gap_left = cuts.cost_share - cuts.lost_share
    if n_nodes == most_nodes or cuts.timed_out or gap_left <= gap + TIME_ERROR:
        return cuts
    program.count_equal_columns()
    counted = solve_up_to(most_nodes)
    return replace(
        min(cuts, counted, key=lambda each: each.cost_share),
        lost_share=max(cuts.lost_share, counted.lost_share),
        timed_out=counted.timed_out,
    )
