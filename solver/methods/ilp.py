"""`ilp`: the step as one integer program, for small graphs, solved through PuLP.

Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization"
(sections 4.2-4.8), in the partitioned form: stage p ends with the first run of node p, before which
any forward node may be recomputed. Variables of a stage: S[x], tensor x is on the device when the
stage begins; R[n], node n is recomputed in it; F[x,n], the storage of x is freed right after n; and
U, the bytes on the device from run to run. It differs from the paper in these points, so that the
simulator's rules hold:

- Forward and backward nodes: later nodes run once, so what they make is a constant of each stage.
- Nodes with several outputs: while one is recomputed, outputs that are still on the device count
  twice.
- Aliases have no bytes; the root is on the device as long as one of them is. A node is not
  recomputed while an alias that another node made holds the storage of one of its outputs: the
  alias is dropped before and recomputed afterwards. If it cannot be, the node has a span without
  recomputation (`StorageGraph.no_recompute`).
- Workspace, tensors of size zero without aliases (never dropped), ops that may not be recomputed,
  outputs made in the forward pass (they may be dropped and recomputed), and a last stage for what
  is still missing at the end of the step.
- A stage has `n_sweeps` sweeps, each like one stage of Checkmate, in which a node runs at most once
  and in graph order. The simulator allows any order and any number of runs. Every sequence of
  recomputations is a series of ascending ones, so with enough sweeps nothing is lost.

**What it is optimal for.** Every schedule with at most `n_sweeps` ascending sequences of
recomputations between two first runs. `ilp` takes up to N_SWEEPS if the program stays small,
otherwise one. Its lower bound, which holds for every schedule, is that of the cuts (at all
positions together if that is small). On random graphs of up to ten nodes its schedules are optimal
by brute force.

**Reductions**, none of which excludes a fastest schedule: the stages up to the first at which
keeping everything could exceed the budget are one stage; tensors and recomputations that can no
longer be of use, and recomputations that never fit, have no variables; the cut bound is a row.

Cost: about n_later * n_forward * n_sweeps binaries. Above MAX_VARIABLES the search would take
hours, so the method raises TooLargeError with the size. When the time limit is reached, the best
schedule so far is returned.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

try:
    import pulp
except ImportError:  # optional: only this method needs it
    pulp = None

from graphs.graph import Graph
from solver.bound import TIME_ERROR, StorageGraph, binding_cut, least_time_s, solve_cuts
from solver.methods.best_so_far import BestSoFar
from solver.methods.ilp_variables import MissingSolverError, Stage, Stages
from solver.methods.proposal import Proposal
from solver.schedule import Schedule, free_after_last_use, without_dead_computes
from solver.sizes_deadlines_progress import NEVER, Deadline, interruptible

N_SWEEPS = 3
"""Sweeps of a stage in a small program; three were enough on every random graph tried."""
SMALL_VARIABLES = 2_500
"""Up to this size a program may have several sweeps, and a bound from all positions at once."""
DIGIT_BITS, TOP_BITS = 16, 20
"""Bits of the digits in which bytes are counted, and maximum bits of the highest digit."""
GAP = 1e-6
"""Relative gap at which the solver stops."""


def ilp(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    seed: int,
) -> Proposal:
    """The fastest schedule of the class that the module describes, and a bound on every schedule.

    Raises TooLargeError, and MissingSolverError if PuLP is not installed.
    """
    if pulp is None:
        raise MissingSolverError(
            "method 'ilp' needs PuLP, which is not installed: pip install pulp, or choose 'auto'"
        )
    lost_share = 0.0
    with BestSoFar(graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s) as search:
        folded, deadline = StorageGraph.of(graph), search.deadline
        binding = binding_cut(folded, budget_bytes=budget_bytes, deadline=deadline)
        lost_share, search.timed_out = binding.lost_share, binding.timed_out
        if math.isinf(lost_share):
            return Proposal(None, math.inf)
        for n_sweeps in range(1, N_SWEEPS + 1):
            if search.best_share <= lost_share + 10 * TIME_ERROR:
                break
            stages = Stages(folded, budget_bytes=budget_bytes, n_sweeps=n_sweeps, deadline=deadline)
            if n_sweeps > 1 and stages.n_variables > SMALL_VARIABLES:
                break
            if n_sweeps == 1 and stages.n_variables <= SMALL_VARIABLES:
                cuts = solve_cuts(
                    folded,
                    positions=range(1, folded.n_nodes + 1),
                    budget_bytes=budget_bytes,
                    as_milp=True,
                    gap=GAP,
                    deadline=deadline,
                )
                lost_share = max(lost_share, cuts.lost_share)
                if math.isinf(lost_share):
                    return Proposal(None, math.inf)
            if search.best_share <= lost_share + 10 * TIME_ERROR:
                break
            schedule, timed_out = solve_stages(
                stages,
                lost_share=lost_share,
                most_share=search.best_share - 10 * TIME_ERROR,
                deadline=deadline,
            )
            search.timed_out = search.timed_out or timed_out
            if schedule is not None and search.is_faster(schedule.order):
                search.fits(schedule)  # it may not fit, because of the solver's tolerances
    bound_s = least_time_s(graph, lost_share=lost_share)
    return dataclasses.replace(search.proposal(), lower_bound_s=bound_s)


Expression = Any
"""A PuLP variable, a sum of variables with factors, or a number."""


@dataclass
class _Sweep:
    """One sweep's variables.

    last: whether it ends with the first run of node p.
    on_device: by item, whether it is on the device when the sweep begins (S).
    recompute: by node, whether it is recomputed (R).
    """

    stage: Stage
    last: bool
    on_device: dict[int, pulp.LpVariable]
    recompute: dict[int, pulp.LpVariable]


class _Model:
    """The PuLP problem; times are in units of the baseline.

    Bytes are counted exactly, even among many gigabytes: in units of their greatest common divisor,
    and if these are many, as digits to the base 2**DIGIT_BITS, in rows of their own with integer
    carries. So the solver's tolerances cannot turn one digit into the next.
    """

    def __init__(
        self,
        stages: Stages,
        *,
        lost_share: float,
        most_share: float = math.inf,
        deadline: Deadline = NEVER,
    ) -> None:
        self.stages = stages
        self.folded = stages.folded
        self.items = stages.items
        own_bytes = {n: int(self.folded.own_bytes[n]) for s in stages.stages for n in s.recompute}
        sizes_bytes = [item.size_bytes for item in self.items]
        self.unit_bytes = math.gcd(*sizes_bytes, *own_bytes.values()) or 1
        most_bytes = sum(sizes_bytes) + max(own_bytes.values(), default=0)
        self.most_units = most_bytes // self.unit_bytes
        more_bits = max(0, self.most_units.bit_length() - TOP_BITS)
        self.n_digits = 1 + math.ceil(more_bits / DIGIT_BITS)
        self.problem = pulp.LpProblem("rematerialise", pulp.LpMinimize)
        self._n_names = 0
        self.sweeps: list[_Sweep] = []
        for stage in stages.stages:
            n_sweeps = stages.n_sweeps if stage.recompute else 1
            for w in range(n_sweeps):
                on_device = {i: self._variable("Binary") for i in stage.needed}
                recompute = {n: self._variable("Binary") for n in stage.recompute}
                self.sweeps.append(_Sweep(stage, w == n_sweeps - 1, on_device, recompute))
        baseline_s = self.folded.graph.baseline_time_s or 1.0
        self.lost = pulp.lpSum(
            column * (self.folded.time_s[n] / baseline_s)
            for sweep in self.sweeps
            for n, column in sweep.recompute.items()
        )
        self.problem += self.lost
        if lost_share > 0:
            self.problem += self.lost >= lost_share
        if most_share < math.inf:
            self.problem += self.lost <= most_share
        for k, sweep in enumerate(self.sweeps):
            deadline.check()
            following = self.sweeps[k + 1] if k + 1 < len(self.sweeps) else None
            self._add_presence_rows(sweep, following)
            self._add_memory_rows(sweep, following)

    def _variable(self, kind: str = "Continuous", *, most: int | None = None) -> pulp.LpVariable:
        self._n_names += 1
        return pulp.LpVariable(f"v{self._n_names}", lowBound=0, upBound=most, cat=kind)

    def _cover(self, sweep: _Sweep, i: int, by: pulp.LpVariable | int) -> None:
        """Add the row: item i is there when the sweep begins, or recomputed in it, if `by` is 1."""
        supply = sweep.on_device[i] + sweep.recompute.get(self.items[i].maker, 0)
        self.problem += supply >= by

    def _add_presence_rows(self, sweep: _Sweep, following: _Sweep | None) -> None:
        """Add the rows of what is on the device: aliases, pinned items, inputs of what runs."""
        p = sweep.stage.p
        for i, column in sweep.on_device.items():
            root = self.items[i].root
            if root != i:
                self.problem += column <= sweep.on_device[root]
            # A storage is not recomputed while an alias that another node made holds it.
            maker = self.items[root].maker
            if maker in sweep.recompute and self.items[i].maker != maker:
                self.problem += column + sweep.recompute[maker] <= 1
            if (p, i) in self.stages.pinned:
                self.problem += column == 1
        for n, column in sweep.recompute.items():
            for i in self.stages.reads[n]:
                self._cover(sweep, i, column)
        for i in self._items_due_in(sweep):
            self._cover(sweep, i, 1)
        if following is not None:
            for i, column in following.on_device.items():
                if i in sweep.on_device:
                    self._cover(sweep, i, column)

    def _items_due_in(self, sweep: _Sweep) -> Sequence[int]:
        """Items read when the sweep ends, by the first run of node p or by the end of the step."""
        if not sweep.last:
            return ()
        if sweep.stage.p < self.folded.n_nodes:
            return self.stages.reads[sweep.stage.p]
        return [i for i, item in enumerate(self.items) if item.uses[-1:] == (self.folded.n_nodes,)]

    def _add_memory_rows(self, sweep: _Sweep, following: _Sweep | None) -> None:
        """Add the rows for the bytes on the device, from run to run, each within the budget."""
        room_bytes = self.stages.budget_bytes - sweep.stage.constant_bytes
        held_digits = self._add_sum_by_digit((i, column) for i, column in sweep.on_device.items())
        for n, column in sweep.recompute.items():
            own = self._digits(int(self.folded.own_bytes[n]) // self.unit_bytes)
            self._add_limit_rows(
                [held + k * column for held, k in zip(held_digits, own, strict=True)], room_bytes
            )
            change = [
                (i, -self._freed_after(sweep, following, i, n))
                for i in self._items_touched_by(sweep, n)
            ]
            for i in self.stages.made[n]:
                # An output that is there already does not count again after the run.
                if i in sweep.on_device and self.items[i].size_bytes:
                    counted_twice = self._variable(most=1)
                    self.problem += counted_twice <= sweep.on_device[i]
                    self.problem += counted_twice <= column
                    change.append((i, column - counted_twice))
            held_digits = self._add_sum_by_digit(change, start=held_digits)
        own_bytes = int(self.folded.own_bytes[sweep.stage.p]) if sweep.last else 0
        self._add_limit_rows(held_digits, room_bytes - own_bytes)

    def _digits(self, units: int) -> list[int]:
        """The digits of a number of units, the lowest first."""
        low = [units >> DIGIT_BITS * d & (1 << DIGIT_BITS) - 1 for d in range(self.n_digits - 1)]
        return [*low, units >> DIGIT_BITS * len(low)]

    def _add_sum_by_digit(
        self, terms: Iterable[tuple[int, Expression]], start: Sequence[Expression] = ()
    ) -> list[pulp.LpVariable]:
        """By digit, a new variable equal to `start` plus all items' sizes times their factors."""
        factors = list(terms)
        sizes = [self._digits(self.items[i].size_bytes // self.unit_bytes) for i, _ in factors]
        total = [self._variable() for _ in range(self.n_digits)]
        for d, column in enumerate(total):
            change = (size[d] * x for size, (_, x) in zip(sizes, factors, strict=True) if size[d])
            self.problem += column == pulp.lpSum([*start[d : d + 1], *change])
        return total

    def _add_limit_rows(self, held: Sequence[Expression], room_bytes: int) -> None:
        """Add the rows: the number with these digits is at most the room."""
        room = min(room_bytes // self.unit_bytes, self.most_units)
        if room < 0:
            self.problem += pulp.lpSum(held) <= -1  # infeasible, since digits are not negative
            return
        carry: Expression = 0
        for d, (amount, most) in enumerate(zip(held, self._digits(room), strict=True)):
            is_last = d == self.n_digits - 1
            up = 0 if is_last else self._variable("Integer", most=len(self.items) + 2)
            self.problem += amount + carry <= most + up * (1 << DIGIT_BITS)
            carry = up

    def _items_touched_by(self, sweep: _Sweep, n: int) -> list[int]:
        """Items with bytes that node n makes, or reads directly or through an alias."""
        names = [*self.stages.reads[n], *self.stages.made[n]]
        roots = dict.fromkeys(self.items[i].root for i in names)
        return [i for i in roots if i in sweep.on_device and self.items[i].size_bytes]

    def _freed_after(
        self, sweep: _Sweep, following: _Sweep | None, i: int, n: int
    ) -> pulp.LpVariable | int:
        """F[i,n]: the storage is freed right after n, its last use in this sweep."""
        if any(self.items[j].root == i for j in self._items_due_in(sweep)):
            return 0
        freed = self._variable(most=1)
        self.problem += freed <= sweep.recompute[n]
        if following is not None and i in following.on_device:
            self.problem += freed + following.on_device[i] <= 1
        for m, column in sweep.recompute.items():
            if m > n and any(self.items[j].root == i for j in self.stages.reads[m]):
                self.problem += freed + column <= 1
        return freed

    def order(self) -> list[str]:
        """Node names in the order of the solution."""
        nodes = self.folded.graph.nodes
        order = [node.name for node in nodes[: self.sweeps[0].stage.p]]
        for sweep in self.sweeps:
            chosen = (n for n, column in sweep.recompute.items() if column.value() > 0.5)
            order += [nodes[n].name for n in chosen]
            if sweep.last and sweep.stage.p < len(nodes):
                order.append(nodes[sweep.stage.p].name)
        return order


def solve_stages(
    stages: Stages,
    *,
    lost_share: float = 0.0,
    most_share: float = math.inf,
    deadline: Deadline,
) -> tuple[Schedule | None, bool]:
    """The program's best schedule, if one was found, and whether the deadline ended the search.

    lost_share: time that provably every schedule loses, as a share of the baseline's.
    most_share: schedules that lose more are excluded.

    Raises OutOfTimeError.
    """
    graph = stages.folded.graph
    with warnings.catch_warnings():
        # PuLP 3 warns about names that PuLP 4 changes, but PuLP 2 lacks the new ones.
        warnings.simplefilter("ignore", DeprecationWarning)
        model = _Model(stages, lost_share=lost_share, most_share=most_share, deadline=deadline)
        deadline.check()
        time_limit_s = deadline.left_s
        has_highs = importlib.util.find_spec("highspy") is not None  # CBC comes with PuLP
        solver_class = pulp.HiGHS if has_highs else pulp.PULP_CBC_CMD
        solver = solver_class(msg=False, threads=1, timeLimit=time_limit_s, gapRel=GAP)
        interruptible(partial(model.problem.solve, solver))
    timed_out = deadline.left_s <= 0.05 * time_limit_s
    if pulp.LpStatus[model.problem.status] == "Infeasible":
        return None, False
    found = (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    values = [column.value() for sweep in model.sweeps for column in sweep.recompute.values()]
    if model.problem.sol_status not in found or None in values:
        return None, timed_out
    return free_after_last_use(graph, without_dead_computes(graph, model.order())), timed_out
