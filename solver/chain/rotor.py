"""The fastest persistent schedule of a chain of unequal blocks within a budget in bytes.

    O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova: Optimal checkpointing for
    heterogeneous chains: how to train deep neural networks with limited memory. Inria research
    report RR-9302, 2019 (rotor; section 4, theorem 1).

A schedule is persistent when what it stores stays until the backward that it was stored for. Take
the segment of blocks s .. t (the loss is block L + 1), with x_{s-1} live and the gradient of x_t
live once it is due, and m bytes for all of the segment, x_{s-1} included. Let E(s, t, m) be the
least time of forwards beyond one for each block, which saves. Either block s saves everything,
before the rest of the segment is done,

    E(s+1, t, m - x_{s-1} - (saved_s - x_s)),

or x_{s-1} is kept, forwards run to some x_{k-1} (s < k <= t), the segment from there is done, and
then what is left, from x_{s-1} once more:

    f_s + .. + f_{k-1}  +  E(k, t, m - x_{s-1})  +  E(s, k-1, m).

A segment of one block costs nothing. Each case needs what its first operations hold at once: see
`_Bytes`. To count x_{s-1} inside m makes both differences depend on s alone, so that for a fixed s
all splits k and all m are one sum and one minimum of matrices.

*Slots.* m is counted in slots. When all sizes are multiples of one that divides the budget into at
most `n_slots`, that one is the slot, and the answer is exact. Otherwise sizes round up to slots and
the budget down, so that no answer overruns. Because each tensor is rounded, most answers then leave
part of the budget empty; the table therefore has slots for a quarter more than the budget, and a
bisection finds the most slots that do not overrun when simulated, in bytes. On random chains of 60
to 200 blocks that gained more than three times as many slots did. From the least m at which the
segment can save everything on, E is 0; below what its first operations need it is infinite.

Optimal for: persistent schedules where it is exact, else for the rounded chain. Where it falls
short: schedules that are not persistent can be faster (rarely, and by little); a chain of many
tensors smaller than a slot looks larger than it is; a block has one way of saving, all or nothing.

Cost: L^3 n_slots / 6 sums, L^2 n_slots / 2 numbers of memory. These are double precision while they
take no more than `MAX_DOUBLE_BYTES`, beyond that single: then schedules whose recomputation differs
by about a millionth may be taken for equal. What is returned is simulated in double precision.
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
    keeping_everything,
    simulate_chain,
)

MAX_DOUBLE_BYTES = 5 * 10**7
"""Of the table in double precision: about 150 blocks on 500 slots. Single is twice as fast."""

SPLITS_AT_ONCE = 64
"""Their sums stay in the processor's cache while the minimum is taken."""

REACH = (5, 4)
"""What the table reaches to, as a multiple of the budget (a fraction), where sizes are rounded."""

STARTS_AT_ONCE = 16
"""Their segments up to t read the same column while it stays in the processor's cache."""

Array = NDArray[np.floating]


def solve_chain(chain: Chain, *, budget_bytes: int, n_slots: int = 500) -> ChainSolution | None:
    """The fastest persistent schedule whose peak, x_0 included, is within the budget.

    None: there is none, or (when sizes do not divide into slots) none that is left after rounding.
    n_slots: into how many parts memory is divided at most.
    """
    for name, value, least in (("budget_bytes", budget_bytes, 0), ("n_slots", n_slots, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r:.60}; it must be an int, {least} or more")
    solution = _simulated(chain, keeping_everything(chain))
    if solution.peak_bytes <= budget_bytes:
        return solution
    table = _Table(chain, budget_bytes=budget_bytes, n_slots=n_slots)
    best = table.solution(table.slots.n_safe)
    fits, overruns = table.slots.n_safe, table.slots.n_slots + 1
    while overruns - fits > 1:
        m = (fits + overruns) // 2
        found = table.solution(m)
        if found is not None and found.peak_bytes > budget_bytes:
            overruns = m
        else:
            fits, best = m, found
    return best


def _simulated(chain: Chain, ops: tuple[ChainOp, ...]) -> ChainSolution:
    cost_s, peak_bytes = simulate_chain(chain, ops)
    return ChainSolution(cost_s=cost_s, peak_bytes=peak_bytes, ops=ops)


@dataclass(frozen=True)
class _Slots:
    """A slot is `numerator / denominator` bytes, of which the table has `n_slots`.

    n_safe: as many as are within the budget. What takes no more, rounded up, cannot overrun it.
    """

    n_slots: int
    n_safe: int
    numerator: int
    denominator: int

    @staticmethod
    def of(chain: Chain, *, budget_bytes: int, n_slots: int) -> _Slots:
        """Needs a size that is not 0."""
        unit = math.gcd(
            *chain.input_bytes,
            *chain.saved_bytes[1:],
            *chain.forward_workspace_bytes,
            *chain.backward_workspace_bytes,
        )
        n_units = budget_bytes // unit
        if n_units <= n_slots:
            return _Slots(n_slots=n_units, n_safe=n_units, numerator=unit, denominator=1)
        more, than = REACH
        return _Slots(
            n_slots=n_slots,
            n_safe=n_slots * than // more,
            numerator=budget_bytes * more,
            denominator=n_slots * than,
        )

    def up(self, size_bytes: int) -> int:
        return -(-size_bytes * self.denominator // self.numerator)


class _Bytes:
    """What the operations of a segment hold at once, in bytes; blocks count from 1 to L + 1.

    The loss saves nothing, its forward is nothing, and its output's gradient takes no bytes.
    """

    def __init__(self, chain: Chain) -> None:
        self.x = (*chain.input_bytes, 0)
        self.saved = (*chain.saved_bytes, 0)
        self.forward_workspace = (0, *chain.forward_workspace_bytes, 0)
        self.backward_workspace = (0, *chain.backward_workspace_bytes)
        self.running = [0] * len(self.x)  # block i forward, keeping its output alone
        for i in range(1, len(self.x)):
            self.running[i] = self.x[i - 1] + self.x[i] + self.forward_workspace[i]

    def saving(self, s: int, t: int) -> int:
        """Block s forward, saving, beside the gradient of x_t, and its backward.

        The backward reads the gradient of x_s and makes that of x_{s-1}.
        """
        forward = self.x[t] + self.forward_workspace[s]
        backward = self.x[s] + self.x[s - 1] + self.backward_workspace[s]
        return self.x[s - 1] + self.saved[s] + max(forward, backward)

    def passing(self, s: int) -> list[int]:
        """For t = s + 1 .. L + 1: s .. t - 1 forward, x_{s-1} kept, beside the gradient of x_t.

        Wherever the chain is split, all of them run once beside these two.
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
        self.bytes = _Bytes(chain)
        x, saved = self.bytes.x, self.bytes.saved
        held = [0, *(self.slots.up(x[s - 1]) for s in range(1, self.last + 1))]
        self.held_keeping_input = held
        self.held_saving = [
            0,
            *(self.slots.up(x[s - 1] + saved[s] - x[s]) for s in range(1, self.last + 1)),
        ]
        self.reached_s = np.array([0.0, *accumulate(chain.forward_s), 0.0])  # f_1 + .. + f_i
        width = self.slots.n_slots + 1
        n_numbers = width * self.last * (self.last + 1) // 2
        self.dtype = np.dtype(np.float64 if 8 * n_numbers <= MAX_DOUBLE_BYTES else np.float32)
        # One piece of memory, for which the system may use large pages.
        numbers = np.empty((self.last * (self.last + 1) // 2, width), self.dtype)
        starts = [t * (t - 1) // 2 for t in range(self.last + 2)]
        self.columns = [numbers[start:stop] for start, stop in pairwise(starts)]
        self._sums = np.empty(SPLITS_AT_ONCE * width, self.dtype)
        self._fill()

    def _fill(self) -> None:
        """Segments by start, from the last on, `STARTS_AT_ONCE` of them from short to long.

        left[k]: for one start s, the forwards from x_{s-1} to x_{k-1} and E(s, k-1, m), as far as
        known. full: by t, the slots at which s .. t can save everything.
        """
        lefts = np.empty((STARTS_AT_ONCE, self.last + 1, self.slots.n_slots + 1), self.dtype)
        full = [0] * (self.last + 1)
        for top in range(self.last, 0, -STARTS_AT_ONCE):
            starts = range(top, max(top - STARTS_AT_ONCE, 0), -1)
            passing = [[0, *map(self.slots.up, self.bytes.passing(s))] for s in starts]
            for t in range(starts[-1], self.last + 1):
                for s, passing_s, left in zip(starts, passing, lefts, strict=False):
                    if s <= t:
                        saving = self.slots.up(self.bytes.saving(s, t))
                        full[t] = max(saving, self.held_saving[s] + full[t] if s < t else 0)
                        self._segment(s, t, saving, passing_s[t - s], full[t], left)

    def _segment(self, s: int, t: int, saving: int, passing: int, full: int, left: Array) -> None:
        """E(s, t, m) from its two cases; `saving` and `passing` are the least m for them."""
        extra_s = self.columns[t][s - 1]
        end = min(full, len(extra_s))
        extra_s[:end] = math.inf
        extra_s[end:] = 0.0
        if s < t and saving < end:
            held = self.held_saving[s]
            extra_s[saving:end] = self.columns[t][s, saving - held : end - held]
        if s < t and passing < end:
            self._split(s, t, passing, end, left)
        if t < self.last:
            np.add(extra_s, self.reached_s[t] - self.reached_s[s - 1], out=left[t + 1])

    def _split(self, s: int, t: int, start: int, end: int, left: Array) -> None:
        """The case of a split, for start <= m < end; lowers what is there.

        Sums run over whole rows as one flat array, several times faster than row by row: what the
        right parts lack in slots is an offset. So m less than that meets the end of the row before;
        `start` is beyond.
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
        """The fastest schedule for m slots, simulated; None when there is none."""
        if math.isinf(self.columns[self.last][0, m]):
            return None
        return _simulated(self.chain, tuple(self._ops(m)))

    def _ops(self, n_slots: int) -> list[ChainOp]:
        ops: list[ChainOp] = []
        # Recursion would be as deep as the chain is long.
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
        """The block at which to split the segment, found as when filling; None: block s saves.

        Where E(s, t, m) is finite, m is enough to pass: who saves needs no less for what follows.
        """
        if s == t:
            return None
        saving_s = math.inf
        if m >= self.slots.up(self.bytes.saving(s, t)):
            saving_s = float(self.columns[t][s, m - self.held_saving[s]])
        left = np.array([self.columns[j][s - 1, m] for j in range(s, t)])
        right = self.columns[t][s:t, m - self.held_keeping_input[s]]
        ran_s = self.reached_s[s:t] - self.reached_s[s - 1]
        splitting_s = left + right + ran_s
        best = int(splitting_s.argmin())
        return None if saving_s <= splitting_s[best] else s + 1 + best
