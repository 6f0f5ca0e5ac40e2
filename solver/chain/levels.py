"""Reverse a chain of equal steps with snapshots on several levels of storage.

Steps and snapshots are those of `solver.chain.binomial`. Each level holds a number of snapshots,
and has a cost of writing and of reading one, in units of one forward step. Levels are listed from
the fastest to the slowest; the first is the memory of the device. While a snapshot is written or
read nothing else runs.

- `hrevolve`: Julien Herrmann, Guillaume Pallez: H-Revolve: a framework for adjoint computation on
  synchronous hierarchical platforms, ACM TOMS 46(2), 2020 (section 3.1). A dynamic program.
- `disk_revolve`: Guillaume Aupy, Julien Herrmann, Paul Hovland, Yves Robert: Optimal multistage
  algorithm for adjoint computation, SIAM J. Sci. Comput. 38(3), 2016 (theorem 3.15). Two levels,
  the slow one without limit.
- `periodic_disk_revolve`: Guillaume Aupy, Julien Herrmann: Periodicity in optimal hierarchical
  checkpointing schemes for adjoint computations, Optimization Methods and Software 32(3), 2017.
  Snapshots on the slow level at equal distances: the distance that is best for endless chains.
- `multistage`: Philipp Stumm, Andrea Walther: MultiStage approaches for optimal offline
  checkpointing, SIAM J. Sci. Comput. 31(3), 2009. The fewest forward steps for all snapshots
  together; those that are written and read most go to the fastest level.

Let x_start be the present state, with m free snapshots on level k and all levels below free. Then
U_k(n, m) is the cost of reversing n steps, and V_k(n, m) the same if x_start has a snapshot on
level k already:

    U_k(n, m) = min(U_{k-1}(n, c_{k-1}), w_k + V_k(n, m - 1))
    V_k(n, m) = min(U_{k-1}(n, c_{k-1}), min over j of j + U_k(n - j, m) + r_k + V_k(j, m))

where c_k is the number of snapshots of level k, and w_k and r_k its costs of writing and reading.

Cost: O(n^2) for each snapshot of a level, in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from solver.chain.binomial import Action, n_extra_steps

MAX_ITERATIONS = 5
"""Maximum iterations of `multistage`."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Level:
    """A level of storage.

    n_snapshots: how many it holds.
    write_cost, read_cost: of one snapshot, in forward steps.
    """

    n_snapshots: int
    write_cost: float = 0.0
    read_cost: float = 0.0


def cost_of(actions: Sequence[Action], levels: Sequence[Level]) -> float:
    """The cost of these actions in forward steps: advances, writing and reading."""
    costs = [0.0]
    for kind, start, stop in actions:
        if kind == "advance":
            costs.append(stop - start)
        elif kind == "store":
            costs.append(levels[stop].write_cost)
        elif kind == "restore":
            costs.append(levels[stop].read_cost)
    return math.fsum(costs)


def hrevolve(*, n_steps: int, levels: Sequence[Level]) -> tuple[Action, ...] | None:
    """The cheapest actions that are nested by levels; None: not enough snapshots.

    In every case that was searched exhaustively, with one to three levels, no schedule is cheaper
    (`tests/solver/chain/test_levels.py`). Raises ValueError if there is no step or no level.
    """
    return _Tables(n_steps, levels).actions()


def disk_revolve(*, n_steps: int, levels: Sequence[Level]) -> tuple[Action, ...] | None:
    """`hrevolve` for a disk that holds any number of snapshots; its `n_snapshots` is ignored.

    levels: the memory, and the disk if there is one.
    """
    memory, *disks = levels
    unlimited = (replace(disk, n_snapshots=n_steps) for disk in disks)
    return hrevolve(n_steps=n_steps, levels=(memory, *unlimited))


def periodic_disk_revolve(*, n_steps: int, levels: Sequence[Level]) -> tuple[Action, ...] | None:
    """Write snapshots to the disk at equal distances, the distance being `period`.

    How many are written, and how the rest is reversed, is chosen to cost least. Between two of them
    no more are written to the disk, and each is read as often as it pays. None: not enough
    snapshots.

    levels: the memory, and the disk if there is one.
    """
    if len(levels) == 1:
        return hrevolve(n_steps=n_steps, levels=levels)
    memory, disk = levels
    distance = period(memory=memory, disk=disk, n_steps=n_steps)
    tables = _Tables(max(n_steps, distance), (memory, Level(1, disk.write_cost, disk.read_cost)))
    costs = [
        n * (disk.write_cost + distance + disk.read_cost + tables.least_cost_after_write[distance])
        + tables.least_cost[n_steps - n * distance]
        for n in range((n_steps - 1) // distance + 1)
    ]
    n_periods = int(np.argmin(costs))
    if math.isinf(costs[n_periods]):
        return None
    starts = [distance * n for n in range(n_periods)]
    found: list[Action] = []
    for start in starts:
        found += (("store", start, 1), ("advance", start, start + distance))
    start = distance * n_periods
    found += tables.stream(("start", 1, start, n_steps - start, 1))
    for start in reversed(starts):
        found.append(("restore", start, 1))
        found += tables.stream(("stored", 1, start, distance, 0))
    return tuple(found)


def period(*, memory: Level, disk: Level, n_steps: int) -> int:
    """The distance of the disk's snapshots with the least cost per step in an endless chain.

    n_steps: the largest distance tried. Of equally good ones the largest is returned.
    """
    tables = _Tables(n_steps, (memory, Level(1, disk.write_cost, disk.read_cost)))
    cost_per_step = [
        (disk.write_cost + disk.read_cost + tables.least_cost_after_write[m]) / m
        for m in range(1, n_steps + 1)
    ]
    return n_steps - int(np.argmin(cost_per_step[::-1]))


def multistage(*, n_steps: int, levels: Sequence[Level]) -> tuple[Action, ...] | None:
    """The fewest forward steps, with the snapshots that are used most on the fastest level.

    Snapshots form a stack, and each place in the stack belongs to one level. Alternately, find the
    reversal with the fewest steps that writes and reads for least on these places, and give the
    places that it uses most to the fastest level, until the cost no longer falls. None: no
    snapshots.
    """
    if n_steps == 1:
        return (("reverse", 1, 0),)
    n_places = min(sum(level.n_snapshots for level in levels), n_steps)
    if n_places == 0:
        return None
    level_of_rank = [k for k, level in enumerate(levels) for _ in range(level.n_snapshots)]
    level_of = [len(levels) - 1] * n_places
    best: tuple[float, tuple[Action, ...]] | None = None
    for _ in range(MAX_ITERATIONS):
        place_levels = [levels[k] for k in level_of]
        actions = tuple(_Stack(n_steps, place_levels).actions())
        io_cost = [0.0] * n_places
        for kind, _, place in actions:
            if kind in ("store", "restore"):
                slow = levels[-1]
                io_cost[place] += slow.write_cost if kind == "store" else slow.read_cost
        order = sorted(range(n_places), key=lambda place: (-io_cost[place], place))
        level_of = [0] * n_places
        for place, k in zip(order, level_of_rank, strict=False):
            level_of[place] = k
        found = tuple(
            (kind, i, stop if kind in ("advance", "reverse") else level_of[stop])
            for kind, i, stop in actions
        )
        cost = cost_of(found, levels)
        if best is not None and cost >= best[0]:
            break
        best = cost, found
    assert best is not None
    return best[1]


class _Stack:
    """Of the reversals with the fewest forward steps, the one with the least writing and reading.

    place_levels: by place in the stack of snapshots, what writing and reading costs there.
    io_cost[d]: by number of steps, the cost with their first state in place d.
    """

    def __init__(self, n_steps: int, place_levels: Sequence[Level]) -> None:
        self.n_steps, self.place_levels = n_steps, place_levels
        n_places = len(place_levels)
        # by number of free places (counting that of the first state) and number of steps
        fewest = np.full((n_places + 1, n_steps + 1), math.inf)
        fewest[:, :2] = 0.0
        for n_free in range(1, n_places + 1):
            for n in range(2, n_steps + 1):
                fewest[n_free, n] = n_extra_steps(n_steps=n, n_snapshots=n_free)
        self._fewest = fewest
        self.io_cost = np.zeros((n_places + 1, n_steps + 1))
        for place in reversed(range(n_places)):
            for n in range(2, n_steps + 1):
                self.io_cost[place, n] = np.min(self._split_costs(place, n))

    def _split_costs(self, place: int, n: int) -> Floats:
        """The cost of each split, with 1 .. n - 1 steps on the left; inf if it runs extra steps."""
        n_free, level = len(self.place_levels) - place, self.place_levels[place]
        left, right = np.arange(1, n), np.arange(n - 1, 0, -1)
        forward = left + self._fewest[n_free - 1, right] + self._fewest[n_free, left]
        costs = level.read_cost + self.io_cost[place, left]
        if n_free > 1:
            next_cost = self.place_levels[place + 1].write_cost + self.io_cost[place + 1, right]
            costs = costs + np.where(right > 1, next_cost, 0.0)
        return np.where(forward == self._fewest[n_free, n], costs, math.inf)

    def actions(self) -> Iterator[Action]:
        """The actions, with places in the stack for levels."""
        yield ("store", 0, 0)
        tasks: list[tuple[str, int, int, int] | Action] = [("stored", 0, 0, self.n_steps)]
        while tasks:
            each = tasks.pop()
            if len(each) == 3:
                yield each
                continue
            _, place, start, n = each
            if n == 1:
                yield ("drop", start, place)
                yield ("reverse", start + 1, start)
                continue
            middle = start + 1 + int(np.argmin(self._split_costs(place, n)))
            yield ("advance", start, middle)
            tasks += [("stored", place, start, middle - start), ("restore", start, place)]
            n_right = start + n - middle
            if n_right == 1:
                tasks.append(("reverse", middle + 1, middle))
            else:
                tasks += [("stored", place + 1, middle, n_right), ("store", middle, place + 1)]


class _Tables:
    """U and V of all levels, for 0 .. n_steps steps.

    start[k][m]: U_k(., m).
    stored[k][m]: V_k(., m).

    Both are inf where steps would have to run with no snapshot left.
    """

    def __init__(self, n_steps: int, levels: Sequence[Level]) -> None:
        if n_steps < 1 or not levels:
            raise ValueError(
                f"n_steps is {n_steps} and levels are {levels}; at least one of each is needed"
            )
        self.n_steps, self.levels = n_steps, levels
        without_snapshots = np.full(n_steps + 1, math.inf)
        without_snapshots[:2] = 0.0  # a single step needs no snapshot
        self._no_level: Floats = without_snapshots
        self.start: list[list[Floats]] = []
        self.stored: list[list[Floats]] = []
        for level in levels:
            lower = self.start[-1][-1] if self.start else without_snapshots
            start, stored = [lower], list[Floats]()
            n_snapshots = min(level.n_snapshots, n_steps)
            for m in range(n_snapshots):
                stored.append(self._costs_if_stored(lower, start[m], level))
                start.append(np.minimum(lower, level.write_cost + stored[m]))
                if np.array_equal(start[m], start[m + 1]):  # then more snapshots do not help either
                    stored += [stored[m]] * (n_snapshots - len(stored))
                    start += [start[m]] * (n_snapshots + 1 - len(start))
                    break
            self.start.append(start)
            self.stored.append(stored)

    @property
    def least_cost(self) -> Floats:
        """The least cost, by number of steps."""
        return self.start[-1][-1]

    @property
    def least_cost_after_write(self) -> Floats:
        """The least cost, by number of steps, if x_start has the slowest level's only snapshot."""
        return self.stored[-1][0]

    def _costs_if_stored(self, lower: Floats, right: Floats, level: Level) -> Floats:
        """V_k(., m) from U_{k-1} and U_k(., m)."""
        found, read = lower.copy(), right + level.read_cost
        for j in range(1, self.n_steps):  # found[j] is final: the case of j steps on the left
            more = found[j + 1 :]
            np.minimum(more, read[1 : self.n_steps - j + 1] + (j + found[j]), out=more)
        return found

    def actions(self) -> tuple[Action, ...] | None:
        if math.isinf(self.least_cost[self.n_steps]):
            return None
        top = len(self.levels) - 1
        m = len(self.start[top]) - 1
        return tuple(self.stream(("start", top, 0, self.n_steps, m)))

    def stream(self, task: tuple[str, int, int, int, int]) -> Iterator[Action]:
        """The actions for one task.

        task: ("start" or "stored", level, first step, number of steps, free snapshots of the
            level); "start" asks for U, "stored" for V.
        """
        tasks: list[tuple[str, int, int, int, int] | Action] = [task]
        while tasks:
            each = tasks.pop()
            if len(each) == 3:
                yield each
                continue
            kind, k, start, n, m = each
            has_snapshot = kind == "stored"
            lower = self.start[k - 1][-1] if k else self._no_level
            if n == 1 or lower[n] <= (self.stored if has_snapshot else self.start)[k][m][n]:
                if has_snapshot:
                    yield ("drop", start, k)
                if n == 1:
                    yield ("reverse", start + 1, start)
                else:
                    tasks.append(("start", k - 1, start, n, len(self.start[k - 1]) - 1))
            elif not has_snapshot:
                tasks.append(("stored", k, start, n, m - 1))
                yield ("store", start, k)
            else:  # the best of 1 .. n - 1 steps on the left
                left, right = self.stored[k][m], self.start[k][m]
                read_cost = self.levels[k].read_cost
                costs = np.arange(1, n) + right[n - 1 : 0 : -1] + read_cost + left[1:n]
                j = 1 + int(np.argmin(costs))
                yield ("advance", start, start + j)
                tasks += [("stored", k, start, j, m), ("restore", start, k)]
                tasks.append(("start", k, start + j, n - j, m))
