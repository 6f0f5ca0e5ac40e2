"""Rows for the bytes that recomputation itself takes, between two positions of a program of cuts.

The rows of cuts count what is on the device while the nodes at their positions run. While node n is
recomputed between p_k and p_{k+1}, the device holds, besides what n reads, makes and takes as
workspace,

- what is pinned from one position to the other;
- units made before n, if a node after n that is recomputed between the two reads them, or if they
  are on the device at p_{k+1};
- units made after n, if they have been on the device since p_k: their maker is not recomputed
  between the two.

This counts what `schedule_from_cuts` does: it recomputes what is missing, once, in the graph's
order. So schedules from these rows mostly fit at once. Without the rows each overflow costs a round
with an allowance, which takes the same bytes from every choice. The rows prove nothing: other
schedules recompute in other orders, or more often.

For unit u, "needed by a reader after n" is a column for each suffix of its readers: a[u,i] is at
least r of the i-th reader and at least a[u,i+1]; the last one is x[u,k+1].
"""

from __future__ import annotations

from collections.abc import Iterable

from solver.bound import CutMilp
from solver.sizes_deadlines_progress import NEVER, Deadline


def add_recompute_rows(cuts: CutMilp, *, deadline: Deadline = NEVER) -> None:
    """Add these rows for everything that the program may recompute.

    Raises OutOfTimeError.
    """
    for k, recompute in enumerate(cuts.recompute):
        deadline.check()
        if recompute:
            span = _Span(cuts, k)
            for n in recompute:
                span.add_row(n)


class _Span:
    """The part of the step from one position to the next, or to the end.

    held_bytes: resident bytes and those of units pinned throughout.
    movable: other units with bytes that may be on the device.
    """

    def __init__(self, cuts: CutMilp, k: int) -> None:
        folded, positions = cuts.folded, cuts.positions
        self._cuts, self._recompute = cuts, cuts.recompute[k]
        self._first = positions[k] + 1
        is_last = k + 1 == len(positions)
        self._last = folded.n_nodes if is_last else positions[k + 1]
        self._kept_after = {} if is_last else cuts.keep[k + 1]
        self.held_bytes = folded.graph.resident_bytes + sum(
            folded.unit_bytes[u] for u in range(folded.n_units) if self._is_held(u)
        )
        self._readers: dict[int, list[int]] = {}
        for n in sorted(self._recompute):
            for u in folded.reads[n]:
                self._readers.setdefault(u, []).append(n)
        self.movable = [
            u
            for u in sorted({*self._kept_after, *self._readers})
            if folded.unit_bytes[u] and not self._is_held(u)
        ]
        self._needed = {u: self._add_needed(u) for u in self.movable}
        self._since_start = {u: self._add_since_start(u) for u in self.movable if u in cuts.keep[k]}

    def _is_held(self, u: int) -> bool:
        spans = self._cuts.folded.pinned[u]
        return any(first <= self._first and self._last <= last for first, last in spans)

    def _add_needed(self, u: int) -> list[int | None]:
        """For each reader of u in order, a column that is 1 if it or a later one needs u.

        Finally a column that is 1 if u is on the device afterwards. None stands for never.
        """
        columns = [self._kept_after.get(u)]
        for n in reversed(self._readers.get(u, [])):
            own = self._recompute[n]
            later = columns[-1]
            columns.append(own if later is None else self._max_column([own, later]))
        return columns[::-1]

    def _add_since_start(self, u: int) -> int | None:
        """A column that is 1 if u must be on the device since the start of the span.

        That is so if it is needed in the span or afterwards and its maker is not recomputed.
        """
        needed, maker = self._needed[u][0], self._cuts.folded.maker[u]
        if needed is None or maker not in self._recompute:
            return needed
        program = self._cuts.program
        column = program.variable(integer=False)
        program.row([column, needed, self._recompute[maker]], [1.0, -1.0, 1.0], lower=0.0)
        return column

    def _max_column(self, columns: Iterable[int]) -> int:
        """A new column that is at least as large as each of these."""
        program = self._cuts.program
        most = program.variable(integer=False)
        for column in columns:
            program.row([most, column], [1.0, -1.0], lower=0.0)
        return most

    def add_row(self, n: int) -> None:
        """Add the row: what is on the device while node n is recomputed fits the budget."""
        cuts, folded, recomputed = self._cuts, self._cuts.folded, self._recompute[n]
        own_units = {*folded.reads[n], *folded.makes[n]}
        own_bytes = int(folded.own_bytes[n]) + sum(
            folded.unit_bytes[u] for u in folded.reads[n] if not self._is_held(u)
        )
        room = cuts.budget_bytes - self.held_bytes
        bytes_of_columns: dict[int, int] = {}
        for u in self.movable:
            column = None if u in own_units else self._presence_column(u, n)
            if column == recomputed:
                own_bytes += folded.unit_bytes[u]
            elif column is not None:
                bytes_of_columns[column] = bytes_of_columns.get(column, 0) + folded.unit_bytes[u]
        if own_bytes > room:
            cuts.program.most[recomputed] = cuts.program.least[recomputed]
        elif own_bytes + sum(bytes_of_columns.values()) > room:
            cuts.add_byte_row({**bytes_of_columns, recomputed: own_bytes}, room)

    def _presence_column(self, u: int, n: int) -> int | None:
        """A column that is 1 if unit u is on the device while n is recomputed; None: never."""
        if self._cuts.folded.maker[u] > n:
            return self._since_start.get(u)
        readers = self._readers.get(u, [])
        return self._needed[u][sum(reader <= n for reader in readers)]
