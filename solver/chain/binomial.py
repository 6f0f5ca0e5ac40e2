"""Reverse a chain of equal steps with few snapshots and the fewest repeated forward steps.

Andreas Griewank, Andrea Walther: Algorithm 799: revolve: an implementation of checkpointing for
the reverse or adjoint mode of computational differentiation, ACM Transactions on Mathematical
Software 26(1), 19-45 (2000), section 2. Step i takes the state x_i to x_{i+1}, for i = 0 .. n-1.
The reverse pass undoes steps n-1, ..., 0 in that order, and undoing step i needs the state x_i.

With s snapshots, x_0's among them, and every step run at most r times without saving, the longest
chain that can be reversed has β(s, r) = C(s+r, s) steps: advance β(s, r-1) steps from x_0, take a
snapshot there, reverse the β(s-1, r) steps on its right with the s-1 snapshots that are left, then
the steps on the left with all s, each of them having been run once. The fewest forward steps that
save nothing ("extra": the n that save come on top) are

    t(n, s) = r·n - C(s+r, r-1)        with the least r such that C(s+r, s) ≥ n.

For lengths between two β the best places to split form an interval; the one furthest to the right
is taken, which leaves the fewest steps to the part with the fewest snapshots.

Optimal for: the number of forward steps, over all schedules that hold at most s states and run
steps one by one. Every schedule that `reversal` streams attains t(n, s).

Where it falls short: it assumes steps of equal time and snapshots of equal bytes, all on one level.
For unequal steps, or where keeping all that a step saves costs less than recomputing it, a dynamic
program over the chain is better; for a second, slower level of snapshots (a disk) see
`solver.chain.levels`. Restoring and storing are free here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import chain
from math import comb

Action = tuple[str, int, int]
"""(kind, start, stop); see `reversal` for the kinds. With snapshots on several levels: ("store", i,
level), ("restore", i, level), ("drop", i, level)."""


def n_extra_steps(*, n_steps: int, n_snapshots: int) -> int:
    """The fewest forward steps that save nothing, t(n, s), in closed form.

    In total `n_steps` more forward steps run, since each step also runs once to be reversed. The
    snapshot of x_0 is one of `n_snapshots`. Raises ValueError unless both are integers from 1 on.
    """
    _check_positive_ints(n_steps, n_snapshots)
    r = _repetitions(n_steps, n_snapshots)
    return r * n_steps - comb(n_snapshots + r, r - 1) if r else 0


def reversal(*, n_steps: int, n_snapshots: int) -> Iterator[Action]:
    """Stream the actions (kind, start, stop) that reverse `n_steps` steps; begin at x_0.

    ("store", i, i)      take a snapshot of the present state, x_i.
    ("advance", i, j)    run forward from x_i to x_j and save nothing: j - i steps.
    ("reverse", i+1, i)  step i, with the present state x_i: run it forward, saving what its
                         backward needs, then backward, from x_{i+1} to x_i. No state is present
                         afterwards.
    ("restore", i, i)    make the snapshot of x_i the present state; the snapshot stays.
    ("drop", i, i)       give up the snapshot of x_i; the present state stays.

    Steps are reversed from the last to the first. At most `n_snapshots` snapshots are held, and
    none at the end. The advances add up to `n_extra_steps`. Memory is O(n_snapshots), regardless of
    `n_steps`. Raises ValueError, when called, unless both are integers from 1 on.
    """
    _check_positive_ints(n_steps, n_snapshots)
    # Flattened in C: one Python frame resumes per action, not two as with `yield from`.
    return chain.from_iterable(_actions_of_parts(n_steps, n_snapshots))


def _actions_of_parts(n_steps: int, n_snapshots: int) -> Iterator[Iterable[Action]]:
    """Split the current steps, put the left part aside, continue with the right part.

    start, stop: the current steps, start .. stop-1; x_start is present and has a snapshot.
    s, r:        snapshots for them (that of x_start included), and how often each step may run;
                 β(s, r-1) ≤ stop - start ≤ β(s, r), which every split below preserves.
    b, c:        β(s, r-1) and β(s-1, r-1). Left and right parts have theirs by one subtraction
                 each from β(s, r) = β(s, r-1) + β(s-1, r), so no binomial is computed twice.
    left:        parts put aside, innermost last: fewer than n_snapshots, as s falls by one
                 with each.
    """
    start, stop, s = 0, n_steps, n_snapshots
    r = _repetitions(n_steps, n_snapshots)
    b, c = (comb(s + r - 1, s), comb(s + r - 2, s - 1)) if r > 1 else (1, 1)
    left: list[tuple[int, int, int, int, int, int]] = []
    yield (("store", 0, 0),)
    while True:
        while s > 1 and stop - start > s + 1:
            right_c = c * (s - 1) // (s + r - 2)
            # With β(s, r-1) steps on the left the right part must not fall below β(s-1, r-1).
            split = min(start + b, stop - c)
            left.append((start, split, s, r - 1, b - c, c - right_c))
            yield (("advance", start, split), ("store", split, split))
            start, s, b, c = split, s - 1, c, right_c
        yield (
            _actions_with_one_snapshot(start, stop)
            if s == 1
            else _actions_with_all_snapshots(start, stop)
        )
        if not left:
            return
        start, stop, s, r, b, c = left.pop()
        yield (("restore", start, start),)


def _actions_with_all_snapshots(start: int, stop: int) -> Iterator[Action]:
    """Take a snapshot of every state but the last, so that no step runs twice without saving."""
    last = stop - 1
    for i in range(start + 1, last):
        yield ("advance", i - 1, i)
        yield ("store", i, i)
    if last > start:
        yield ("advance", last - 1, last)
        yield ("reverse", stop, last)
        for i in range(last - 1, start, -1):
            yield ("restore", i, i)
            yield ("drop", i, i)
            yield ("reverse", i + 1, i)
        yield ("restore", start, start)
    yield ("drop", start, start)
    yield ("reverse", start + 1, start)


def _actions_with_one_snapshot(start: int, stop: int) -> Iterator[Action]:
    """With only the snapshot of x_start: run forward from it to every step."""
    for i in range(stop - 1, start, -1):
        yield ("advance", start, i)
        yield ("reverse", i + 1, i)
        yield ("restore", start, start)
    yield ("drop", start, start)
    yield ("reverse", start + 1, start)


def _repetitions(n_steps: int, n_snapshots: int) -> int:
    """The least r with C(s+r, s) ≥ n, by doubling and bisection: for s = 1 it is n - 1."""
    if n_steps == 1:
        return 0
    most = 1
    while comb(n_snapshots + most, n_snapshots) < n_steps:
        most *= 2
    return bisect_left(
        range(most), n_steps, lo=most // 2, key=lambda r: comb(n_snapshots + r, n_snapshots)
    )


def _check_positive_ints(n_steps: int, n_snapshots: int) -> None:
    for name, value in (("n_steps", n_steps), ("n_snapshots", n_snapshots)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}; it must be an int, 1 or more")
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
