"""Linear and integer programs, solved by scipy's HiGHS: sparse rows, one thread, repeatable."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from solver.sizes_deadlines_progress import NEVER, Deadline, OutOfTimeError, interruptible

Floats = npt.NDArray[np.float64]

NODES_TIMES_COLUMNS_SQUARED = 10**9
"""Limit on the branch-and-bound nodes of one solve times its columns squared, since the time of a
node grows faster than the columns: ten seconds at most.
"""


@dataclass
class Milp:
    """Minimise cost·x + constant over rows lower <= A x <= upper and least <= x <= most.

    Columns and rows are added one by one. In a MILP the variables are integers, except those added
    with integer=False.
    """

    constant: float = 0.0
    cost: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    _row_starts: list[int] = field(default_factory=lambda: [0])
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _lower: list[float] = field(default_factory=list)
    _upper: list[float] = field(default_factory=list)
    _has_counts: bool = False

    def variable(
        self, *, cost: float = 0.0, least: float = 0.0, most: float = 1.0, integer: bool = True
    ) -> int:
        """Add a variable; returns its column."""
        self.cost.append(cost)
        self.least.append(least)
        self.most.append(most)
        self.integer.append(integer)
        return len(self.cost) - 1

    @property
    def n_affordable_nodes(self) -> int:
        """Branch-and-bound nodes that one solve can afford (0: not even the root)."""
        return NODES_TIMES_COLUMNS_SQUARED // max(1, len(self.cost)) ** 2

    def add_count_of(self, columns: list[int]) -> None:
        """Add a variable that equals the sum of these columns.

        It excludes no solution. Where many columns are alike, a search that branches on how many of
        them are chosen, not on which, ends a hundred times sooner.
        """
        total = self.variable(most=math.fsum(self.most[column] for column in columns))
        self.row([*columns, total], [1.0] * len(columns) + [-1.0], lower=0.0, upper=0.0)
        self._has_counts = True

    def row(
        self,
        columns: list[int],
        values: list[float],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> int:
        """Add the row lower <= sum of values * columns <= upper; returns its number."""
        self._columns.extend(columns)
        self._values.extend(values)
        self._row_starts.append(len(self._columns))
        self._lower.append(lower)
        self._upper.append(upper)
        return len(self._lower) - 1

    def limit(self, row: int, lower: float, upper: float) -> None:
        """Set new limits for a row."""
        self._lower[row], self._upper[row] = lower, upper

    def append(self, other: Milp, *, weight: float) -> int:
        """Add the variables and rows of another program, its cost multiplied by a weight.

        The other's constant is not added. Returns the column here of the other's first variable.
        """
        first = len(self.cost)
        self.cost += [weight * each for each in other.cost]
        self.least += other.least
        self.most += other.most
        self.integer += other.integer
        self._has_counts = self._has_counts or other._has_counts
        for columns, values, lower, upper in other.rows():
            self.row([first + column for column in columns], values, lower=lower, upper=upper)
        return first

    def rows(self) -> Iterator[tuple[list[int], list[float], float, float]]:
        """Yield each row's columns, their values, and the row's lower and upper limit."""
        limits = zip(pairwise(self._row_starts), self._lower, self._upper, strict=True)
        for (start, end), lower, upper in limits:
            yield self._columns[start:end], self._values[start:end], lower, upper

    def solve(
        self,
        *,
        as_milp: bool,
        gap: float = 0.0,
        node_limit: int | None = None,
        deadline: Deadline = NEVER,
    ) -> Answer:
        """Solve as a MILP (`as_milp`) or as its LP relaxation.

        gap: a MILP stops when its bound is within this share of the objective's value, constant
            included.
        node_limit: maximum branch-and-bound nodes; unlike a time limit it makes the answer
            independent of the machine's load.
        deadline: ends the search early, as Ctrl-C does; the answer's timed_out is then set.
        """
        time_limit_s = deadline.left_s
        if time_limit_s <= 0:
            return Answer(values=None, bound=-math.inf, timed_out=True)
        from scipy.optimize import Bounds, LinearConstraint, milp  # here: slow to import
        from scipy.sparse import csr_array

        as_milp = as_milp and bool(self.cost)  # without columns HiGHS reports no dual bound
        # Presolve would substitute the sums for the variables of `add_count_of`.
        presolve = not (as_milp and self._has_counts)
        options: dict[str, float | int | bool] = {"presolve": presolve, "mip_rel_gap": gap}
        if node_limit is not None:
            options["node_limit"] = node_limit
        if math.isfinite(time_limit_s):
            options["time_limit"] = time_limit_s
        # The constant is a column fixed to 1, so that the gap is a share of the full objective.
        columns = len(self.cost) + 1
        matrix = csr_array(
            (self._values, self._columns, self._row_starts), shape=(len(self._lower), columns)
        )
        run = partial(
            milp,
            c=np.array([*self.cost, self.constant]),
            integrality=np.array([*self.integer, False], dtype=int) if as_milp else None,
            bounds=Bounds(np.array([*self.least, 1.0]), np.array([*self.most, 1.0])),
            constraints=LinearConstraint(matrix, np.array(self._lower), np.array(self._upper))
            if self._lower
            else None,
            options=options,
        )
        try:
            result = interruptible(run)
        except OutOfTimeError:
            return Answer(values=None, bound=-math.inf, timed_out=True)
        values = None if result.x is None else np.asarray(result.x[:-1], dtype=np.float64)
        if as_milp:
            bound = result.mip_dual_bound
            bound = -math.inf if bound is None or math.isnan(bound) else float(bound)
        else:
            bound = float(result.fun) if result.status == 0 else -math.inf
        bound = math.inf if result.status == 2 else bound
        timed_out = result.status == 1  # reaching the node limit has another status
        return Answer(values=values, bound=bound, timed_out=timed_out)


@dataclass(frozen=True)
class Answer:
    """What the solver found.

    values: of the variables (None: no feasible point found).
    bound: no feasible point costs less (inf: proven infeasible).
    timed_out: the deadline or Ctrl-C ended the search.
    """

    values: Floats | None
    bound: float
    timed_out: bool
