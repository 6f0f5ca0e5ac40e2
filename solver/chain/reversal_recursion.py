"""What a deep chain must recompute again and again: a bound by nested reversals.

A few cuts see each stretch of the forward pass recomputed once or twice. Near the least budget of a
deep chain a stretch is recomputed as often as in the reversals of Griewank & Walther (2000), Grimm,
Pottier & Rostaing-Schmidt (1996), and this bound sees it. It holds for every legal schedule, one
that drops what it kept too, for unequal stretches, and for a room that differs from check to check.

**What is counted.** Forward nodes are divided into levels 1 .. n, each a contiguous stretch. In the
backward pass there are checks, later nodes C_n < .. < C_1, and before them C_{n+1}, the end of the
forward pass. D_l, the demand of level l, are units of level l that some later node in the window
(C_{l+1}, C_l] reads. w is a number of bytes. Units that are smaller than w / 2, pinned anywhere, or
read by a forward node more than one level on are *free*: taken to be there always, and never
counted. So is all that no level makes. M_t is what is left at check t for the units of lower
levels: the budget less what every schedule has there besides.

A range (i, j] of levels is *empty* at a time if fewer than w bytes of its units are there; then it
has at most one unit, as each has w / 2. Let f_l be the least time of level l's nodes that have to
run to make what is demanded of level l or, for level l + 1, read across its end, beside at most one
unit above; d the most that one unit of the level itself saves (`solver.chain.reversal_levels`). So
if (i, j] is empty at C_t, t > j, then from there to C_j each of its levels l runs for f_l, but d in
all. Let s_l(h) be the least time of level l's nodes to make D_l from at most h bytes of its units.

**Theorem.** Let (i, j] be empty at C_t, t > j, and let units of levels up to i take at least m
bytes at the checks j .. i + 1. Then levels i + 1 .. j run from there on for at least

    A(i, j, m) = min over k in (i, j] of  max(0, f_{i+1} + .. + f_k - d)  +  A(k, j, m + w)
                                          + A(i, k - 1, m)  +  s_k(M_{k+1} - m) if k < j

with A(i, i, m) = 0, where k < j only if m + w <= M_t for all t in (k, j].

Proof. Let k be the least in (i, j] such that (i, k] is not empty at any check t in (k, j]; j is
such a one. So at these checks levels up to k have m + w bytes, which is at most M_t, and (k, j] was
empty at the start: by induction levels k + 1 .. j run for A(k, j, m + w). Each of the levels
i + 1 .. k runs before C_j to make D_j, together for the first term. If k > i + 1, then k - 1 was no
such number: (i, k - 1] is empty at some check t in (k - 1, j]. As t >= k, the demands of levels
k - 1 .. i + 1 come later, and from C_t on these levels run for A(i, k - 1, m). The runs of the
first term were before C_j, so before C_t. If k < j, level k ran for the first term before C_{k+1},
as C_j is not after it; and in the window of D_k it runs again, for what it has not at C_{k+1},
where it has at most M_{k+1} - m bytes. ∎

For the whole step begin at its first op, where nothing is there: T(i, n, m) is A without the first
term, whose runs may be first runs, and with T(k, n, m + w) in the place of A(k, n, m + w). All that
T counts comes after the end of the forward pass. So every schedule recomputes for T(0, n, 0).

With equal levels T is a quarter at most below the fewest extra steps of Griewank & Walther: that
level k is made again from the state before it is not counted where that state has to be reached
once more. It is weak where much is kept: there cuts say more.

Cost: n² steps on rows of n numbers for each w in the largest room. Beyond MAX_STEPS the longest run
of levels with no more room than usual stands for all, with its least f and s: n steps.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import numpy.typing as npt

from solver.bound import TIME_ERROR, StorageGraph
from solver.chain.blocks import Blocks
from solver.chain.reversal_levels import MAX_SLOTS, Levels, levels_of
from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError

Floats = npt.NDArray[np.float64]

MAX_STEPS = 4_000_000
"""Levels squared times slots; a few seconds."""


def reversal_bound(
    folded: StorageGraph, blocks: Blocks, *, budget_bytes: int, deadline: Deadline = NEVER
) -> float:
    """The share of the baseline's time that every schedule within the budget loses, at least.

    deadline: past it, what the divisions so far prove.
    """
    baseline_s = folded.graph.baseline_time_s
    if not baseline_s:
        return 0.0
    proven_s = 0.0
    with contextlib.suppress(OutOfTimeError):
        for levels in levels_of(folded, blocks, budget_bytes):
            proven_s = max(proven_s, least_recompute_s(levels, deadline=deadline))
    return max(0.0, proven_s / baseline_s - TIME_ERROR)


def least_recompute_s(levels: Levels, *, deadline: Deadline = NEVER) -> float:
    """T(0, n, 0) of the module, or a smaller number. Raises OutOfTimeError."""
    n = levels.n_levels
    n_slots = max((room // levels.width_bytes for room in levels.room_bytes), default=0)
    if n < 2 or n_slots >= MAX_SLOTS:
        return 0.0
    n_slots = max(0, n_slots)
    if n * n * (1 + n_slots) <= MAX_STEPS:
        return _unequal(levels, n_slots, deadline)
    run = equal_run(levels)
    return 0.0 if run is None else equal_s(levels, run, deadline=deadline)


def _unequal(levels: Levels, n_slots: int, deadline: Deadline) -> float:
    """The recursion, for m = 0, w, 2 w .. from the most to none."""
    n, width = levels.n_levels, levels.width_bytes
    reached = np.concatenate(([0.0], np.cumsum(levels.forward_s)))
    again = np.zeros((0, 0))
    whole = np.zeros((0,))
    for slot in reversed(range(n_slots + 1)):
        kept = _where_it_fits(levels, (slot + 1) * width)
        saving = []
        for k in range(1, n):
            deadline.check()
            saving.append(levels.saving_s(k, levels.room_bytes[k] - slot * width))
        saving.append(0.0)
        above = np.where(kept, again, np.inf) if again.size else np.full(kept.shape, np.inf)
        table = np.zeros((n + 1, n + 1))
        for i in range(n - 1, -1, -1):
            deadline.check()
            row = table[i]
            row[i + 1 :] = np.inf
            for k in range(i + 1, n + 1):
                first = max(0.0, reached[k] - reached[i] - levels.one_unit_s)
                base = first + row[k - 1]
                row[k] = min(row[k], base)
                longer = above[k, k + 1 :] + (base + saving[k - 1])
                row[k + 1 :] = np.minimum(row[k + 1 :], longer)
        top = np.zeros(n + 1)
        for i in range(n - 1, -1, -1):
            ends = [table[i, n - 1]]
            if whole.size:
                ends += [
                    whole[k] + table[i, k - 1] + saving[k - 1]
                    for k in range(i + 1, n)
                    if kept[k, n]
                ]
            top[i] = min(ends)
        again, whole = table, top
    return float(whole[0])


def _where_it_fits(levels: Levels, held_bytes: int) -> npt.NDArray[np.bool_]:
    """[k, j]: whether these bytes fit at all checks in (k, j]."""
    n = levels.n_levels
    fits = np.array([True, *(room >= held_bytes for room in levels.room_bytes)])
    last_bad = np.maximum.accumulate(np.where(fits, -1, np.arange(n + 1)))
    kept: npt.NDArray[np.bool_] = last_bad[np.newaxis, :] <= np.arange(n + 1)[:, np.newaxis]
    return kept


def equal_run(levels: Levels) -> tuple[int, int] | None:
    """The longest run (first, last) of levels with no more room than usual, in slots of w."""
    slots = [room // levels.width_bytes for room in levels.room_bytes]
    usual = max(set(slots), key=lambda each: (slots.count(each), each))
    best, start = (1, 0), 1
    for level, each in enumerate(slots, start=1):
        if each > usual:
            start = level + 1
        elif level - start > best[1] - best[0]:
            best = start, level
    return best if best[1] > best[0] else None


def equal_s(levels: Levels, run: tuple[int, int], *, deadline: Deadline = NEVER) -> float:
    """T of these levels where all are as the cheapest, and all checks have the largest room.

    Raises OutOfTimeError.
    """
    first, last = run
    n, width = last - first + 1, levels.width_bytes
    room_bytes = max(levels.room_bytes[first - 1 : last])
    run_s = min(levels.forward_s[first - 1 : last])
    again = np.full(n + 1, np.inf)
    whole = np.full(n + 1, np.inf)
    for slot in reversed(range(max(0, room_bytes // width) + 1)):
        left_bytes = room_bytes - slot * width
        saving_s = math.inf
        for k in range(first, last):
            deadline.check()
            saving_s = min(saving_s, levels.saving_s(k, left_bytes))
        above, above_whole = again.copy(), whole.copy()
        row = np.full(n + 1, np.inf)
        row[0] = 0.0
        top = np.full(n + 1, np.inf)
        top[0] = 0.0
        for k in range(1, n + 1):
            deadline.check()
            base = max(0.0, k * run_s - levels.one_unit_s) + row[k - 1]
            row[k] = min(row[k], base)
            top[k] = min(top[k], row[k - 1])
            rest = slice(1, n + 1 - k)
            row[k + 1 :] = np.minimum(row[k + 1 :], above[rest] + (base + saving_s))
            longer = above_whole[rest] + (row[k - 1] + saving_s)
            top[k + 1 :] = np.minimum(top[k + 1 :], longer)
        again, whole = row, top
    return float(whole[n])
