"""Greedy eviction: run the step within the budget, dropping what is cheapest to lose.

In the manner of Kirisame et al. 2021, "Dynamic Tensor Rematerialization", but with the future
known. Ops run in order; missing inputs are recomputed, recursively. When bytes are short, the
forward unit with the least score is dropped:

    score(u) = time to recompute it / (bytes * distance to its next use)

The time includes recomputing its missing inputs, so that long runs of missing tensors do not get
longer. Units that are not in the guide (the set that a cut keeps) go first. If the run gets stuck,
it starts again with one more unit recomputed ahead of time (`solver.methods.early_recompute`).
Nothing is proven. Eviction finds a schedule where the schedules of cuts overflow, down to budgets
near the minimum, and never exceeds the budget: its count of bytes is at least the simulator's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from solver.bound import StorageGraph
from solver.methods.early_recompute import Gate, gates_for
from solver.schedule import Schedule, free_after_last_use, without_dead_computes
from solver.sizes_deadlines_progress import NEVER, Deadline

REFRESH = 500
"""Scores are recomputed once per 1 + forward nodes // REFRESH evictions."""
MAX_RUNS = 3
"""Runs per node of the graph after which a search that thrashes is given up."""
MAX_RUNS_BEFORE = 2
"""Runs per forward node before one position; with more, two of its inputs evict each other."""
MAX_RESTARTS = 12
"""Default number of restarts."""


def evict(
    folded: StorageGraph,
    *,
    budget_bytes: int,
    guide: Mapping[int, Collection[int]] | None = None,
    patience: float = 1.0,
    n_restarts: int = MAX_RESTARTS,
    deadline: Deadline = NEVER,
) -> tuple[Schedule | None, int]:
    """Run the step greedily within the budget.

    Returns the schedule (None: stuck) and the work it took. The work is the same on every machine:
    ten for a run, one for a unit or node considered.

    guide: by position, units that should be on the device then: they are dropped last.
    patience: the exponent of the distance to the next use.
    n_restarts: how often to start again with one more unit recomputed ahead of time.
    deadline: when it passes, the search ends without a schedule.
    """
    work, gates = 0, list[Gate]()
    for _ in range(1 + n_restarts):
        run = _Run(folded, budget_bytes, dict(guide or {}), patience, deadline, gates)
        is_done = run.run_step()
        work += run.work
        if is_done:
            order = without_dead_computes(folded.graph, run.order)
            return free_after_last_use(folded.graph, order), work
        if deadline.passed:
            break
        candidates = gates_for(folded, run.now, budget_bytes=budget_bytes)
        gate = next((gate for gate in candidates if gate not in gates), None)
        if gate is None:
            break
        gates.append(gate)
    return None, work


@dataclass
class _Run:
    """One attempt to run the step.

    budget_bytes, guide, patience, deadline: as in `evict`.
    gates: units to recompute ahead of time.
    order: names of the nodes run so far.
    """

    folded: StorageGraph
    budget_bytes: int
    guide: dict[int, Collection[int]]
    patience: float
    deadline: Deadline
    gates: Sequence[Gate]
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        folded, graph = self.folded, self.folded.graph
        self.tensors_of: list[list[str]] = [[] for _ in range(folded.n_units)]
        for name, u in folded.unit_of.items():
            self.tensors_of[u].append(name)
        self.available = {tensor.name for tensor in graph.resident}
        self.live: set[int] = set()
        self._droppable_after: dict[int, list[int]] = {}
        for u, n in enumerate(folded.maker):
            if n < folded.n_forward and not folded.recomputable[n]:
                self._droppable_after.setdefault(folded.last_useful_position[n], []).append(u)
        self.bytes = graph.resident_bytes
        self.now = 0
        self._inputs_of = [  # by forward node, the units that it reads, with their makers
            (n, [(u, folded.maker[u]) for u in folded.reads[n] if folded.maker[u] < n])
            for n in range(folded.n_forward)
        ]
        self._next_use = [0] * folded.n_units
        self._guide_positions = sorted(self.guide)
        self._n_evictions = 0
        self._ranking_costs: list[float] = []
        self._ranked: list[int] = []
        self._held_until: dict[int, int] = {}  # units recomputed ahead of time, and until when
        self.work = 0

    def run_step(self) -> bool:
        """Run the whole step; False if stuck."""
        folded = self.folded
        for p in range(folded.n_nodes):
            self.now = p
            starting_gates = [each for each in self.gates if each.since == p]
            if not self._make_available([folded.unit_names[each.unit] for each in starting_gates]):
                return False
            for each in starting_gates:
                self._held_until[each.unit] = max(each.until, self._held_until.get(each.unit, 0))
            if not self._make_available(folded.needed_names(p)):
                return False
            self._held_until = {u: until for u, until in self._held_until.items() if until > p}
            if not self._compute(p, frozenset(), ()):
                return False
            # Outputs of nodes that run only once are dropped when they are of no more use. What can
            # be recomputed stays while bytes last.
            for u in (*folded.reads[p], *folded.makes[p]):
                if folded.maker[u] >= folded.n_forward and not any(q > p for q in folded.uses[u]):
                    self._drop(u)
            for u in self._droppable_after.get(p, ()):
                self._drop(u)
        self.now = folded.n_nodes
        return self._make_available(folded.graph.outputs)

    def _drop(self, u: int) -> None:
        if u in self.live:
            self.live.discard(u)
            self.bytes -= self.folded.unit_bytes[u]
            self.available.difference_update(self.tensors_of[u])

    def _make_available(self, names: Collection[str]) -> bool:
        """Make all of these tensors available at the same time."""
        unit_of = self.folded.unit_of
        wanted = frozenset(unit_of[name] for name in names if name in unit_of)
        max_runs = min(
            MAX_RUNS * self.folded.n_nodes + 1000,
            len(self.order) + MAX_RUNS_BEFORE * self.folded.n_forward + 100,
        )
        while True:
            missing = [name for name in names if name not in self.available]
            if not missing:
                return True
            stack = [missing[0]]
            while stack:
                if len(self.order) > max_runs or self.deadline.passed:
                    return False
                name = stack[-1]
                if name in self.available:
                    stack.pop()
                    continue
                n = self._maker_of(name)
                if not self.folded.recomputable[n] or self.folded.cannot_recompute(n, self.now):
                    return False
                graph = self.folded.graph
                if lacking := [
                    x for x in graph.needs[graph.nodes[n].name] if x not in self.available
                ]:
                    stack.extend(reversed(lacking))
                    continue
                if not self._compute(n, wanted, stack):
                    return False
                stack.pop()

    def _maker_of(self, name: str) -> int:
        return self.folded.position[self.folded.graph.producer[name].name]

    def _compute(self, n: int, wanted: frozenset[int], stack: Sequence[str]) -> bool:
        """Run node n after making room; False if no room can be made.

        wanted: units that the node to be run first reads.
        stack: tensors still to be recomputed for it. What their makers read is dropped only if
            nothing else can be.
        """
        folded = self.folded
        # Outputs that are still live from the last run are replaced: nothing reads them again.
        replaced_bytes = (folded.unit_bytes[u] for u in folded.makes[n] if u in self.live)
        need_bytes = int(folded.own_bytes[n]) - sum(replaced_bytes)
        if self.bytes + need_bytes > self.budget_bytes:
            locked = {*folded.reads[n], *folded.makes[n]}
            pending = {u for name in stack for u in folded.reads[self._maker_of(name)]}
            # Give up what is needed soon only if dropping everything else is not enough.
            for spared in (locked | wanted | pending, locked | wanted, locked):
                self._make_room(need_bytes, spared)
            if self.bytes + need_bytes > self.budget_bytes:
                return False
        node = folded.graph.nodes[n]
        for u in folded.makes[n]:
            if u not in self.live:
                self.live.add(u)
                self.bytes += folded.unit_bytes[u]
        for name in node.outputs:  # its aliases show the old storage
            self.available.difference_update(folded.graph.views.get(name, ()))
        self.available.update(node.outputs)
        self.order.append(node.name)
        self.work += 10
        return True

    def _make_room(self, need_bytes: int, locked: set[int]) -> None:
        if self.bytes + need_bytes <= self.budget_bytes:
            return
        is_fresh = self._n_evictions % (1 + self.folded.n_forward // REFRESH) == 0
        self._n_evictions += 1
        if is_fresh:
            self._ranking_costs = self._costs()
            self._rank()
        if not self._drop_ranked(need_bytes, locked) and not is_fresh:
            self._rank()
            self._drop_ranked(need_bytes, locked)

    def _rank(self) -> None:
        """Rank what can be dropped, the cheapest to lose first."""
        folded = self.folded
        candidates = [
            u
            for u in self.live
            if folded.maker[u] < folded.n_forward
            and folded.unit_bytes[u]
            and folded.recomputable[folded.maker[u]]
        ]
        self.work += len(self.live) + len(candidates)
        coming = [p for p in self._guide_positions if p >= self.now] or self._guide_positions[-1:]
        guide = self.guide[coming[0]] if coming else ()
        scored = []
        for u in candidates:
            uses, i = folded.uses[u], self._next_use[u]
            while i < len(uses) and uses[i] < self.now:
                i += 1
            self._next_use[u] = i
            distance = (uses[i] if i < len(uses) else 2 * folded.n_nodes) - self.now + 1
            cost_s = self._ranking_costs[folded.maker[u]]
            score = cost_s / (folded.unit_bytes[u] * distance**self.patience)
            scored.append((u in guide and i < len(uses), score, u))
        self._ranked = [u for *_, u in sorted(scored)]

    def _drop_ranked(self, need_bytes: int, locked: set[int]) -> bool:
        """Drop units in the order of the ranking until the bytes suffice; whether they do."""
        folded, not_dropped = self.folded, []
        for i, u in enumerate(self._ranked):
            if self.bytes + need_bytes <= self.budget_bytes:
                not_dropped += self._ranked[i:]
                break
            pinned = folded.pinned[u] and folded.is_pinned(u, self.now)
            if u in self.live and u not in locked and u not in self._held_until and not pinned:
                self._drop(u)
            else:
                not_dropped.append(u)
        self.work += len(self._ranked) - len(not_dropped)
        self._ranked = not_dropped
        return self.bytes + need_bytes <= self.budget_bytes

    def _costs(self) -> list[float]:
        """By forward node: seconds to recompute it and the dearest chain of its missing inputs."""
        folded = self.folded
        self.work += folded.n_forward
        costs = list(folded.time_s[: folded.n_forward])
        live = self.live
        for n, inputs in self._inputs_of:
            missing_s = 0.0
            for u, maker in inputs:
                if u not in live and costs[maker] > missing_s:
                    missing_s = costs[maker]
            costs[n] += missing_s
        return costs
