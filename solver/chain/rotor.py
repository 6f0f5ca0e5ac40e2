"""The fastest persistent schedule of a chain of unequal blocks within a budget in bytes.

    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova: Optimal checkpointing for
    heterogeneous chains: how to train deep neural networks with limited memory. Inria research
    report RR-9302, 2019 (rotor; section 4, theorem 1).

A schedule is persistent if what it stores stays until the backward for which it was stored. Take
the segment of blocks s .. t (the loss is block L + 1), with x_{s-1} live, the gradient of x_t live
once it is due, and m bytes for the whole segment, x_{s-1} included. Each block runs one forward
that saves everything; let E(s, t, m) be the least time of all other forwards. Either block s saves
everything before the rest of the segment is done,

    E(s+1, t, m - x_{s-1} - (saved_s - x_s)),

or x_{s-1} is kept, forwards run to some x_{k-1} (s < k <= t), the segment from there is done, and
then the blocks before it, starting from x_{s-1} once more:

    f_s + .. + f_{k-1}  +  E(k, t, m - x_{s-1})  +  E(s, k-1, m).

A segment of one block costs nothing. Each case needs what its first operations hold at once: see
`_SegmentBytes`. Since m includes x_{s-1}, both differences depend on s alone, so that for a fixed s
all splits k and all m are one sum and one minimum of matrices.

*Slots.* m is counted in slots. If all sizes are multiples of a unit that divides the budget into at
most `n_slots`, that unit is the slot, and the answer is exact. Otherwise sizes round up to slots
and the budget down, so that no answer exceeds it. Because each tensor is rounded, most answers then
leave part of the budget unused. So the table has slots for a quarter more than the budget, and a
bisection finds the most slots whose answer fits when simulated in bytes. On random chains of 60 to
200 blocks this gained more than tripling the number of slots did. From the least m at which the
segment can save everything, E is 0; below what its first operations need, E is infinite.

Optimal for: persistent schedules where it is exact, else for the rounded chain. Where it falls
short: schedules that are not persistent can be faster (rarely, and by little); a chain of many
tensors smaller than a slot looks larger than it is; a block saves everything or nothing.

Cost: L^3 n_slots / 6 sums, L^2 n_slots / 2 numbers of memory. The numbers are double precision
while they take no more than `MAX_DOUBLE_BYTES`, beyond that single precision: then schedules whose
recomputation differs by about a millionth may count as equal. The schedule that is returned is
simulated in double precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from solver.chain.problem import (
    Backward,
    Chain,
    ChainOp,
    ChainSolution,
    ForwardKeepingAll,
    ForwardKeepingInput,
    ForwardKeepingOutput,
    ops_keeping_everything,
    simulate_chain,
)

MAX_DOUBLE_BYTES = 5 * 10**7
"""Size of the table up to which it is in double precision: about 150 blocks with 500 slots. Single
precision is twice as fast.
"""

SPLITS_AT_ONCE = 64
"""Splits whose sums stay in the processor's cache while their minimum is taken."""

TABLE_PER_BUDGET = (5, 4)
"""Where sizes are rounded, the table covers this multiple of the budget (a fraction)."""

STARTS_AT_ONCE = 16
"""Starts whose segments up to t are filled together, reading one column that stays in the
processor's cache.
"""

Array = NDArray[np.floating]


def solve_chain(chain: Chain, *, budget_bytes: int, n_slots: int = 500) -> ChainSolution | None:
    """The fastest persistent schedule whose peak, x_0 included, is within the budget.

    n_slots: maximum number of slots into which memory is divided.

    Returns None if there is no such schedule, or (when sizes are not multiples of a slot) none that
    fits after rounding. Raises ValueError if budget_bytes or n_slots is not a valid int.
    """
    for name, value, least in (("budget_bytes", budget_bytes, 0), ("n_slots", n_slots, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r:.60}; it must be an int, {least} or more")
    solution = _simulate(chain, ops_keeping_everything(chain))
    if solution.peak_bytes <= budget_bytes:
        return solution
    table = _Table(chain, budget_bytes=budget_bytes, n_slots=n_slots)
    best = table.solution(table.slots.n_safe)
    n_fitting, n_overrunning = table.slots.n_safe, table.slots.n_slots + 1
    while n_overrunning - n_fitting > 1:
        m = (n_fitting + n_overrunning) // 2
        found = table.solution(m)
        if found is not None and found.peak_bytes > budget_bytes:
            n_overrunning = m
        else:
            n_fitting, best = m, found
    return best


def _simulate(chain: Chain, ops: tuple[ChainOp, ...]) -> ChainSolution:
    cost_s, peak_bytes = simulate_chain(chain, ops)
    return ChainSolution(cost_s=cost_s, peak_bytes=peak_bytes, ops=ops)


@dataclass(frozen=True)
class _Slots:
    """The table has `n_slots` slots of `numerator / denominator` bytes each.

    n_safe: slots within the budget. What needs no more than these, rounded up, fits the budget.
    """

    n_slots: int
    n_safe: int
    numerator: int
    denominator: int

    @staticmethod
    def of(chain: Chain, *, budget_bytes: int, n_slots: int) -> _Slots:
        """Choose the slots of a chain in which at least one size is not 0."""
        unit = math.gcd(
            *chain.input_bytes,
            *chain.saved_bytes[1:],
            *chain.forward_workspace_bytes,
            *chain.backward_workspace_bytes,
        )
        n_units = budget_bytes // unit
        if n_units <= n_slots:
            return _Slots(n_slots=n_units, n_safe=n_units, numerator=unit, denominator=1)
        numerator, denominator = TABLE_PER_BUDGET
        return _Slots(
            n_slots=n_slots,
            n_safe=n_slots * denominator // numerator,
            numerator=budget_bytes * numerator,
            denominator=n_slots * denominator,
        )

    def needed_for(self, size_bytes: int) -> int:
        """Slots that these bytes need, rounded up."""
        return -(-size_bytes * self.denominator // self.numerator)


class _SegmentBytes:
    """What the operations of a segment hold at once, in bytes; blocks count from 1 to L + 1.

    The loss saves nothing, its forward takes nothing, and the gradient of its output has no bytes.
    """

    def __init__(self, chain: Chain) -> None:
        self.x = (*chain.input_bytes, 0)
        self.saved = (*chain.saved_bytes, 0)
        self.forward_workspace = (0, *chain.forward_workspace_bytes, 0)
        self.backward_workspace = (0, *chain.backward_workspace_bytes)
        self.running = [0] * len(self.x)  # while block i runs forward and only its output is kept
        for i in range(1, len(self.x)):
            self.running[i] = self.x[i - 1] + self.x[i] + self.forward_workspace[i]

    def bytes_to_save(self, s: int, t: int) -> int:
        """Bytes while block s runs forward and saves, beside the gradient of x_t, or runs backward.

        The backward reads the gradient of x_s and makes that of x_{s-1}.
        """
        forward = self.x[t] + self.forward_workspace[s]
        backward = self.x[s] + self.x[s - 1] + self.backward_workspace[s]
        return self.x[s - 1] + self.saved[s] + max(forward, backward)

    def bytes_to_pass(self, s: int) -> list[int]:
        """For t = s + 1 .. L + 1: bytes while s .. t - 1 run forward without saving.

        Beside them are x_{s-1} and the gradient of x_t. All of these blocks run once beside these
        two, whichever k is the split.
        """
        behind_s = (self.x[s - 1] + running for running in self.running[s + 1 : -1])
        most = accumulate(behind_s, max, initial=self.running[s])
        return [gradient + held for gradient, held in zip(self.x[s + 1 :], most, strict=False)]


class _Table:
    """E(s, t, m) for all segments: `columns[t][s - 1][m]`, with m in slots."""

    def __init__(self, chain: Chain, *, budget_bytes: int, n_slots: int) -> None:
        self.chain = chain
        self.last = chain.n_blocks + 1
        self.slots = _Slots.of(chain, budget_bytes=budget_bytes, n_slots=n_slots)
        self.bytes = _SegmentBytes(chain)
        x, saved = self.bytes.x, self.bytes.saved
        held = [0, *(self.slots.needed_for(x[s - 1]) for s in range(1, self.last + 1))]
        self.held_keeping_input = held
        self.held_saving = [
            0,
            *(self.slots.needed_for(x[s - 1] + saved[s] - x[s]) for s in range(1, self.last + 1)),
        ]
        self.reached_s = np.array([0.0, *accumulate(chain.forward_s), 0.0])  # f_1 + .. + f_i
        width = self.slots.n_slots + 1
        n_numbers = width * self.last * (self.last + 1) // 2
        self.dtype = np.dtype(np.float64 if 8 * n_numbers <= MAX_DOUBLE_BYTES else np.float32)
        # One contiguous array, for which the system may use large pages.
        numbers = np.empty((self.last * (self.last + 1) // 2, width), self.dtype)
        starts = [t * (t - 1) // 2 for t in range(self.last + 2)]
        self.columns = [numbers[start:stop] for start, stop in pairwise(starts)]
        self._sums = np.empty(SPLITS_AT_ONCE * width, self.dtype)
        self._fill()

    def _fill(self) -> None:
        """Fill segments by start, from the last on, several starts together, from short to long.

        left[k]: for one start s, the forwards from x_{s-1} to x_{k-1} plus E(s, k-1, m), for the k
        filled so far.
        slots_to_save_all: by t, the slots at which s .. t can save everything.
        """
        lefts = np.empty((STARTS_AT_ONCE, self.last + 1, self.slots.n_slots + 1), self.dtype)
        slots_to_save_all = [0] * (self.last + 1)
        for top in range(self.last, 0, -STARTS_AT_ONCE):
            starts = range(top, max(top - STARTS_AT_ONCE, 0), -1)
            slots_to_pass = [
                [0, *map(self.slots.needed_for, self.bytes.bytes_to_pass(s))] for s in starts
            ]
            for t in range(starts[-1], self.last + 1):
                for s, to_pass, left in zip(starts, slots_to_pass, lefts, strict=False):
                    if s <= t:
                        slots_to_save = self.slots.needed_for(self.bytes.bytes_to_save(s, t))
                        slots_to_save_all[t] = max(
                            slots_to_save,
                            self.held_saving[s] + slots_to_save_all[t] if s < t else 0,
                        )
                        self._fill_segment(
                            s, t, slots_to_save, to_pass[t - s], slots_to_save_all[t], left
                        )

    def _fill_segment(
        self,
        s: int,
        t: int,
        slots_to_save: int,
        slots_to_pass: int,
        slots_to_save_all: int,
        left: Array,
    ) -> None:
        """Fill E(s, t, m); `slots_to_save` and `slots_to_pass` are the least m of its two cases."""
        extra_s = self.columns[t][s - 1]
        end = min(slots_to_save_all, len(extra_s))
        extra_s[:end] = math.inf
        extra_s[end:] = 0.0
        if s < t and slots_to_save < end:
            held = self.held_saving[s]
            extra_s[slots_to_save:end] = self.columns[t][s, slots_to_save - held : end - held]
        if s < t and slots_to_pass < end:
            self._take_best_split(s, t, slots_to_pass, end, left)
        if t < self.last:
            np.add(extra_s, self.reached_s[t] - self.reached_s[s - 1], out=left[t + 1])

    def _take_best_split(self, s: int, t: int, start: int, end: int, left: Array) -> None:
        """Lower E(s, t, m) to the case of a split, for start <= m < end.

        Sums run over whole rows as one flat array, several times faster than row by row. The slots
        that the right parts have less become an offset into it. An m smaller than the offset would
        read the end of the previous row, but `start` is larger.
        """
        width = left.shape[1]
        held = self.held_keeping_input[s]
        best = self.columns[t][s - 1, start:end]
        flat_right = self.columns[t].reshape(-1)
        flat_left = left.reshape(-1)
        for first in range(s + 1, t + 1, SPLITS_AT_ONCE):
            stop = min(first + SPLITS_AT_ONCE, t + 1)
            sums = self._sums[: (stop - first) * width]
            right = flat_right[(first - 1) * width - held : (stop - 1) * width - held]
            np.add(right, flat_left[first * width : stop * width], out=sums)
            least = np.minimum.reduce(sums.reshape(-1, width)[:, start:end], axis=0)
            np.minimum(best, least, out=best)

    def solution(self, m: int) -> ChainSolution | None:
        """The fastest schedule for m slots, simulated; None if there is none."""
        if math.isinf(self.columns[self.last][0, m]):
            return None
        return _simulate(self.chain, tuple(self._ops(m)))

    def _ops(self, n_slots: int) -> list[ChainOp]:
        """The operations of the fastest schedule, found by walking back through the table."""
        ops: list[ChainOp] = []
        # A stack instead of recursion, which would be as deep as the chain is long.
        todo: list[tuple[int, int, int] | Backward] = [(1, self.last, n_slots)]
        while todo:
            item = todo.pop()
            if isinstance(item, Backward):
                ops.append(item)
                continue
            s, t, m = item
            k = self._best_split(s, t, m)
            if k is None:
                if s < self.last:
                    ops.append(ForwardKeepingAll(s))
                todo.append(Backward(s))
                if s < t:
                    todo.append((s + 1, t, m - self.held_saving[s]))
            else:
                ops.append(ForwardKeepingInput(s))
                ops.extend(map(ForwardKeepingOutput, range(s + 1, k)))
                todo.append((s, k - 1, m))
                todo.append((k, t, m - self.held_keeping_input[s]))
        return ops

    def _best_split(self, s: int, t: int, m: int) -> int | None:
        """The block at which the segment is split in the best case; None: block s saves instead.

        Where E(s, t, m) is finite, m is enough for `bytes_to_pass`, since a segment whose block s
        saves needs no less for what follows.
        """
        if s == t:
            return None
        saving_s = math.inf
        if m >= self.slots.needed_for(self.bytes.bytes_to_save(s, t)):
            saving_s = float(self.columns[t][s, m - self.held_saving[s]])
        left = np.array([self.columns[j][s - 1, m] for j in range(s, t)])
        right = self.columns[t][s:t, m - self.held_keeping_input[s]]
        ran_s = self.reached_s[s:t] - self.reached_s[s - 1]
        splitting_s = left + right + ran_s
        best = int(splitting_s.argmin())
        return None if saving_s <= splitting_s[best] else s + 1 + best
