"""What a deep chain must recompute again and again: a lower bound by nested reversals.

A few cuts see each stretch of the forward pass recomputed once or twice. Near the minimum budget of
a deep chain a stretch is recomputed as often as in the reversals of Griewank & Walther (2000) and
Grimm, Pottier & Rostaing-Schmidt (1996), and this bound sees it. It holds for every legal schedule,
also one that drops what it kept, for unequal stretches, and if the room differs from check to
check.

**What is counted.** Forward nodes are divided into levels 1 .. n, each a contiguous stretch. In the
backward pass n later nodes C_n < .. < C_1 are the checks; C_{n+1}, before them, is the end of the
forward pass. The demand D_l of level l is those of its units that some later node in the window
(C_{l+1}, C_l] reads. w is a number of bytes. Units that are smaller than w / 2, pinned anywhere, or
read by a forward node more than one level on are *free*: assumed to be on the device always, and
never counted. So are units that no level makes. M_t is the room at check t for units of lower
levels: the budget less what else every schedule has on the device there.

A range (i, j] of levels is *empty* at a time if fewer than w bytes of its units are on the device;
then that is at most one unit, since each has at least w / 2. f_l is the least time of those nodes
of level l that have to run to make D_l, or what level l + 1 reads of level l, if at most one unit
of the levels above is on the device. d is the most time that one unit of the level itself saves
(`solver.chain.nested_reversal_levels`). So if (i, j] is empty at C_t, t > j, then from there to C_j
each of its levels l runs for f_l, less d once for all of them: F(i, j) = max(0, f_{i+1} + .. + f_j
- d). s_l(h) is the least time of level l's nodes to make D_l from at most h bytes of its units.

**Arrival.** In window l, later nodes may read a set E_l of units of level l - 1, and nodes of level
l that are recomputed there may read others. s'_l(h) >= s_l(h) is the least time if the latter read
nothing of level l - 1 outside E_l. *Level l - 1 is due* in window l if what is read of it there
cannot be one unit of an empty range: always if E_l cannot be one, and otherwise when more than E_l
is read, if none of these larger sets can be one. f'_l, d' and F' are f, d and F if each level must
also make the least that is read of it when it is due.

**Theorem.** Let (i, j] be empty at C_t, t > j, and let units of levels up to i take at least m
bytes at the checks j .. i + 2. Then from there on levels i + 1 .. j run for at least A(i, j, m). If
also t > j + 1, these units take m bytes at check j + 1 too, and level j is due in window j + 1,
they run for at least P(i, j, m). Both are zero for i = j, else

    A(i, j, m) = min of  F(i, j) + A(i, j - 1, m)
                         and a(k), b(k) with A and F, for i < k < j, m + w <= M_t for t in (k, j]
    P(i, j, m) = min of  F'(i, j) + A(i, j, m)
                         and a(k), b(k) with P and F' for A and F, for i < k <= j,
                         m + w <= M_t for t in (k, j + 1]
    a(k) = F(i, k) + A(k, j, m + w) + min(s'_k(M_{k+1} - m) + A(i, k - 1, m),
                                          s_k(M_{k+1} - m) + P(i, k - 1, m))
    b(k) = A(i, k - 1, m) + max(F(i, k) + A(k, j, m + w) + s_k(M_{k+1} - m - w),
                                F(i, k - 1) + A(k - 1, j, m + w)),  k > i + 1

where in the minimum of a(k) both terms have P if level k - 1 is always due in window k, and both
have A if it need not be due.

Proof. *A.* Let k be the least number in (i, j] such that (i, k] is not empty at any check t in (k,
j]; there is one, since j is. So at these checks levels up to k have m + w bytes, which is at most
M_t, and (k, j] was empty at the start: by induction levels k + 1 .. j run for A(k, j, m + w). Each
of the levels i + 1 .. k runs before C_j to make D_j, together for F(i, k). If k > i + 1, then k - 1
is not such a number: (i, k - 1] is empty at some check t in [k, j]. As t >= k, the demands of
levels k - 1 .. i + 1 come later, and from C_t on these levels run for A(i, k - 1, m). The runs of
the first term were before C_j, so before C_t. That is all if k = j. Otherwise level k ran for the
first term before C_{k+1}, as C_j is not after it; and in window k it runs again, for what it lacks
at C_{k+1}, where it has at most M_{k+1} - m bytes.

If t can be chosen above k (or if k = i + 1, where no t is needed), everything read of level k - 1
in window k is read after C_t. So if level k - 1 is due there, levels i + 1 .. k - 1 run for P(i, k
- 1, m) from C_t on. Level k runs for s'_k if level k - 1 is due only because of E_k or not at all,
else for s_k: this is a(k). If t = k is the only choice, (i, k - 1] is not empty at the checks in
(k, j]. Then levels up to k - 1 have m + w bytes there, which leaves M_{k+1} - m - w for level k;
and as these are all the checks of A(k - 1, j, m + w), levels k .. j run for that and levels i + 1
.. k - 1 for F(i, k - 1) before C_j: this is b(k).

*P.* If (i, j] is empty at C_{j+1}, levels i + 1 .. j ran for F'(i, j) before it, and run from there
on for A(i, j, m). Otherwise take the least k in (i, j] such that (i, k] is not empty at any check t
in (k, j + 1]; j is such a number. The rest is as above, with the window of level j + 1 in place of
D_j, C_{j+1} in place of C_j, and a P that is zero for k = j. ∎

For the whole step start at its first op, where the device holds no units. T(i, n, m) is A without
the first terms F, whose runs may be first runs, and with T in place of A(k, j, m + w) and
A(k - 1, j, m + w). All runs that T counts come after the end of the forward pass. So every schedule
recomputes for at least T(0, n, 0).

With equal levels, of which nothing is kept but what crosses from one to the next, T is the fewest
extra steps of Griewank & Walther. The bound is weak where much is kept (cuts prove more there) and
where several units cross from level to level, since an empty range may have one of them.

Cost: a sixth of n³ steps for each w in the largest room. Beyond MAX_CELLS no level counts as due,
and beyond MAX_STEPS only the longest run of levels with no more room than usual is used, all with
its least f and s: n² steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from solver.bound import TIME_ERROR, StorageGraph
from solver.chain.blocks import Blocks
from solver.chain.nested_reversal_levels import MAX_SLOTS, Levels, divisions_into_levels
from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError

Floats = npt.NDArray[np.float64]

MAX_STEPS, MAX_CELLS = 4_000_000, 600_000_000
"""Limits on levels squared times slots, and on that times levels; a few seconds."""


def reversal_bound(
    folded: StorageGraph, blocks: Blocks, *, budget_bytes: int, deadline: Deadline = NEVER
) -> float:
    """The share of the baseline's time that every schedule within the budget loses, at least.

    deadline: when it passes, what the divisions into levels have proven so far is returned.
    """
    baseline_s = folded.graph.baseline_time_s
    if not baseline_s:
        return 0.0
    proven_s = 0.0
    with contextlib.suppress(OutOfTimeError):
        for levels in divisions_into_levels(folded, blocks, budget_bytes, deadline=deadline):
            proven_s = max(proven_s, least_recompute_s(levels, deadline=deadline))
    return max(0.0, proven_s / baseline_s - TIME_ERROR)


def least_recompute_s(levels: Levels, *, deadline: Deadline = NEVER) -> float:
    """T(0, n, 0) of the module, in seconds, or a smaller number. Raises OutOfTimeError."""
    n = levels.n_levels
    n_slots = max((room // levels.width_bytes for room in levels.room_bytes), default=0)
    if n < 2 or n_slots >= MAX_SLOTS:
        return 0.0
    n_slots = max(0, n_slots)
    steps = n * n * (1 + n_slots)
    if n * steps <= MAX_CELLS:
        return _unequal_bound_s(levels, n_slots, deadline)
    run = longest_equal_run(levels)
    proven_s = 0.0 if run is None else equal_bound_s(levels, run, deadline=deadline)
    if steps <= MAX_STEPS:
        weaker = replace(levels, arrival=None)
        proven_s = max(proven_s, _unequal_bound_s(weaker, n_slots, deadline))
    return proven_s


def _unequal_bound_s(levels: Levels, n_slots: int, deadline: Deadline) -> float:
    """T(0, n, 0) by the recursion, with m = 0, w, 2 w .. from the largest down."""
    n, width = levels.n_levels, levels.width_bytes
    costs = [_Costs.at(levels, slot, deadline) for slot in range(n_slots + 2)]
    above: _Table | None = None
    whole_s = np.zeros(0)
    for slot in reversed(range(n_slots + 1)):
        has_room = _has_room_at_checks(levels, (slot + 1) * width)
        table = _Table(levels, costs[slot], costs[slot + 1], above, has_room)
        for length in range(1, n + 1):
            deadline.check()
            table.fill(length)
        above, whole_s = table, table.whole_step_s(whole_s)
    return float(whole_s[0])


@dataclass(frozen=True)
class _Costs:
    """s and s' by level, if lower levels have m bytes."""

    saving_s: Floats
    unaided_s: Floats

    @classmethod
    def at(cls, levels: Levels, slot: int, deadline: Deadline) -> _Costs:
        saving, unaided = [0.0], [0.0]
        for k in range(1, levels.n_levels):
            deadline.check()
            left_bytes = levels.room_bytes[k] - slot * levels.width_bytes
            saving.append(levels.saving_s(k, left_bytes))
            unaided.append(levels.saving_s(k, left_bytes, unaided=True))
        return cls(np.array([*saving, 0.0]), np.array([*unaided, 0.0]))


class _Table:
    """A and P for one m, by i and j - i.

    run_s: A.
    due_run_s: P.
    last_term_s: min(s' + A, s + P) at (i, k - 1], by k - i.
    """

    def __init__(
        self,
        levels: Levels,
        costs: _Costs,
        costs_above: _Costs,
        above: _Table | None,
        has_room: npt.NDArray[np.bool_],
    ) -> None:
        n = levels.n_levels
        self._n, self._above, self._has_room = n, above, has_room
        self._savings_s = costs.saving_s, costs.unaided_s
        self._saved_above_s = costs_above.saving_s
        self._arrival = levels.arrival
        self.run_s = np.zeros((n + 1, n + 1))
        self.due_run_s = np.zeros((n + 1, n + 1))
        self.last_term_s = np.zeros((n + 1, n + 1))
        arrival = levels.arrival
        self._first_s = _range_times_s(levels.forward_s, levels.one_unit_s)
        self._first_due_s = self._first_s
        if arrival is not None:
            self._first_due_s = _range_times_s(arrival.forward_s, arrival.one_unit_s)
        if above is not None:
            self._run_above_s = _by_end(above.run_s, has_room, 0)
            self._due_run_above_s = _by_end(above.due_run_s, has_room, 1)

    def fill(self, length: int) -> None:
        """A and P for the ranges of this length, from those of shorter ranges."""
        rows = slice(0, self._n + 1 - length)
        self._fill_last_term(length)
        self.run_s[rows, length] = self._first_s[rows, length] + self.run_s[rows, length - 1]
        if self._above is not None:
            least = self._least_split(self._first_s, self._run_above_s, length, length - 1)
            self.run_s[rows, length] = np.minimum(self.run_s[rows, length], least)
        if self._arrival is None:
            return
        self.due_run_s[rows, length] = self._first_due_s[rows, length] + self.run_s[rows, length]
        if self._above is not None:
            least = self._least_split(self._first_due_s, self._due_run_above_s, length, length)
            self.due_run_s[rows, length] = np.minimum(self.due_run_s[rows, length], least)
        at_least = self.due_run_s[rows, length], self.run_s[rows, length]
        self.due_run_s[rows, length] = np.maximum(*at_least)

    def whole_step_s(self, above: Floats) -> Floats:
        """T by i, from T for m + w."""
        n = self._n
        whole_s = np.zeros(n + 1)
        for i in range(n - 1, -1, -1):
            whole_s[i] = self.run_s[i, n - 1 - i]
            k = np.flatnonzero(self._has_room[i + 1 : n, n]) + i + 1
            if self._above is not None and len(k):
                least = (above[k] + self.last_term_s[i, k - i]).min()
                run_s = self.run_s[i, k - i - 1]
                pairs = np.maximum(above[k] + self._saved_above_s[k], above[k - 1]) + run_s
                whole_s[i] = min(whole_s[i], least, pairs[k > i + 1].min(initial=math.inf))
        return whole_s

    def _fill_last_term(self, length: int) -> None:
        rows, ends = slice(0, self._n + 1 - length), slice(length, self._n + 1)
        run_s, due_run_s = self.run_s[rows, length - 1], self.due_run_s[rows, length - 1]
        saving_s, unaided_s = (each[ends] for each in self._savings_s)
        if self._arrival is None:
            self.last_term_s[rows, length] = saving_s + run_s
            return
        always, if_read = (
            np.array([False, *each])[ends]
            for each in (self._arrival.always_due, self._arrival.due_if_read)
        )
        self.last_term_s[rows, length] = np.minimum(
            unaided_s + np.where(always, due_run_s, run_s),
            saving_s + np.where(always | if_read, due_run_s, run_s),
        )

    def _least_split(
        self, first_s: Floats, above: tuple[Floats, Floats], length: int, longest: int
    ) -> Floats:
        """The least of a(k) and b(k) over k = i + 1 .. i + longest, by i."""
        rows, ends = slice(0, self._n + 1 - length), slice(length, self._n + 1)
        fits, plain = (each[ends, length::-1] for each in above)  # by k - i, from 0 on
        if longest < 1:
            return np.full(self._n + 1 - length, np.inf)
        k = slice(1, longest + 1)
        least: Floats = (first_s[rows, k] + self.last_term_s[rows, k] + fits[:, k]).min(axis=1)
        if longest > 1 and self._arrival is not None:
            k, before = slice(2, longest + 1), slice(1, longest)
            saved = sliding_window_view(self._saved_above_s, longest - 1)[2 : self._n + 3 - length]
            one = first_s[rows, k] + fits[:, k] + saved
            other = first_s[rows, before] + plain[:, before]
            lower_run_s = self.run_s[rows, before]
            least = np.minimum(least, (np.maximum(one, other) + lower_run_s).min(axis=1))
        return least


def _range_times_s(level_s: Sequence[float], one_unit_s: float) -> Floats:
    """[i, j - i]: the time of the levels in (i, j], less that of one unit."""
    n = len(level_s)
    prefix_s = np.concatenate(([0.0], np.cumsum(level_s), np.zeros(n)))
    ends = sliding_window_view(prefix_s, n + 1)[: n + 1]
    sums: Floats = np.maximum(0.0, ends - prefix_s[: n + 1, np.newaxis] - one_unit_s)
    return sums


def _by_end(table: Floats, room: npt.NDArray[np.bool_], checks_more: int) -> tuple[Floats, Floats]:
    """By j and j - k: inf where m + w does not fit up to check j + checks_more; and without inf."""
    n = len(table) - 1
    plain = np.full((n + 1, n + 1), np.inf)
    fits = np.full((n + 1, n + 1), np.inf)
    for j in range(n + 1 - checks_more):
        k = np.arange(j, -1, -1)
        plain[j, : j + 1] = table[k, j - k]
        fits[j, : j + 1] = np.where(room[k, j + checks_more], plain[j, : j + 1], np.inf)
    return fits, plain


def _has_room_at_checks(levels: Levels, held_bytes: int) -> npt.NDArray[np.bool_]:
    """[k, j]: whether these bytes fit at all checks in (k, j]."""
    n = levels.n_levels
    fits = np.array([True, *(room >= held_bytes for room in levels.room_bytes)])
    last_bad = np.maximum.accumulate(np.where(fits, -1, np.arange(n + 1)))
    has_room: npt.NDArray[np.bool_] = last_bad[np.newaxis, :] <= np.arange(n + 1)[:, np.newaxis]
    return has_room


def longest_equal_run(levels: Levels) -> tuple[int, int] | None:
    """The longest run (first, last) of levels with no more room than usual, in slots of w."""
    slots = [room // levels.width_bytes for room in levels.room_bytes]
    usual_slots = max(set(slots), key=lambda each: (slots.count(each), each))
    best, start = (1, 0), 1
    for level, each in enumerate(slots, start=1):
        if each > usual_slots:
            start = level + 1
        elif level - start > best[1] - best[0]:
            best = start, level
    return best if best[1] > best[0] else None


def equal_bound_s(levels: Levels, run: tuple[int, int], *, deadline: Deadline = NEVER) -> float:
    """T if all of these levels are as the cheapest, and all their checks have the largest room.

    Raises OutOfTimeError.
    """
    first, last = run
    n, width = last - first + 1, levels.width_bytes
    room_bytes = max(levels.room_bytes[first - 1 : last])
    equal = _EqualTable(levels, first, last)
    for slot in reversed(range(max(0, room_bytes // width) + 1)):
        left_bytes = room_bytes - slot * width
        saving_s = unaided_s = math.inf
        for k in range(first, last):
            deadline.check()
            saving_s = min(saving_s, levels.saving_s(k, left_bytes))
            unaided_s = min(unaided_s, levels.saving_s(k, left_bytes, unaided=True))
        equal.next_slot(saving_s, unaided_s)
        for length in range(1, n + 1):
            deadline.check()
            equal.fill(length)
    return float(equal.whole_step_s[n])


class _EqualTable:
    """A, P, T and `last_term_s` of `_Table` by j - i, for one m after the other."""

    def __init__(self, levels: Levels, first: int, last: int) -> None:
        def sums(level_s: Sequence[float], one_unit_s: float) -> Floats:
            every_s = min(level_s[first - 1 : last]) * np.arange(n + 1)
            less_s: Floats = np.maximum(0.0, every_s - one_unit_s)
            return less_s

        self._n = n = last - first + 1
        self._first_s = sums(levels.forward_s, levels.one_unit_s)
        self._nothing = np.zeros(n + 1)
        arrival = self._arrival = levels.arrival
        self._always_due = self._due_if_read = False
        if arrival is not None:
            self._first_due_s = sums(arrival.forward_s, arrival.one_unit_s)
            always, if_read = arrival.always_due[first:last], arrival.due_if_read[first:last]
            self._always_due = all(always)
            self._due_if_read = all(map(any, zip(always, if_read, strict=True)))
        self.run_s = self.due_run_s = self.whole_step_s = np.full(n + 1, np.inf)
        self._saving_s = self._unaided_s = 0.0

    def next_slot(self, saving_s: float, unaided_s: float) -> None:
        self._above = self.run_s, self.due_run_s, self.whole_step_s
        self._saved_above_s, self._saving_s, self._unaided_s = self._saving_s, saving_s, unaided_s
        self.run_s, self.due_run_s, self.whole_step_s, self._last_term_s = (
            np.zeros(self._n + 1) for _ in range(4)
        )

    def fill(self, length: int) -> None:
        run_s, due_run_s = self.run_s[length - 1], self.due_run_s[length - 1]
        self._last_term_s[length] = min(
            self._unaided_s + (due_run_s if self._always_due else run_s),
            self._saving_s + (due_run_s if self._due_if_read else run_s),
        )
        run_above_s, due_run_above_s, whole_above_s = self._above
        least = self._least_split(self._first_s, run_above_s, length, length - 1)
        self.run_s[length] = min(self._first_s[length] + run_s, least)
        self.due_run_s[length] = self.run_s[length]
        if self._arrival is not None:
            least = self._least_split(self._first_due_s, due_run_above_s, length, length)
            if_due_s = min(self._first_due_s[length] + self.run_s[length], least)
            self.due_run_s[length] = max(self.run_s[length], if_due_s)
        least = self._least_split(self._nothing, whole_above_s, length, length - 1)
        self.whole_step_s[length] = min(run_s, least)

    def _least_split(self, first_s: Floats, above: Floats, length: int, longest: int) -> float:
        """The least of a(k) and b(k) over k - i = 1 .. longest."""
        rest = above[length::-1]
        k = slice(1, longest + 1)
        least = float((first_s[k] + self._last_term_s[k] + rest[k]).min(initial=math.inf))
        k, before = slice(2, longest + 1), slice(1, longest)
        one = first_s[k] + rest[k] + self._saved_above_s
        other = first_s[before] + rest[before]
        pairs = np.maximum(one, other) + self.run_s[before]
        return min(least, float(pairs.min(initial=math.inf)))
