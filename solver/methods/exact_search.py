"""The fastest schedule of a small graph, by A* over what is on the device.

A state is how many nodes have run for the first time, and which tensors are on the device. Its
moves are to run the next node for the first time, or a recomputable node that has run. Before a
run, storages are freed only if the run does not fit otherwise, and then each way that frees no
storage too many is a move of its own. Nothing is lost by this: take any legal schedule, and put off
each free until a run needs the room. Then more is on the device at any time, so everything that
runs in the schedule can run, or need not. Two kinds of tensors are freed at once: those that
nothing can read any more, not even a recomputation, and before a recomputation what is left of its
outputs, with all views of them (by the rules, they would count twice or forbid it).

`docs/theory.md` has the proof. The cost of a move is its recompute time. The estimate of what is
still to come is the time of all nodes that must run again in any case: the makers of missing
tensors that later nodes read, and of the missing ones among their own inputs, each counted once.
This is what a cut (`solver.bound.cut`) counts without its row of bytes. A move never lowers cost
plus estimate, so the first complete state is a fastest schedule (Hart, Nilsson and Raphael 1968, "A
formal basis for the heuristic determination of minimum cost paths"), and if the search ends early,
the least sum in the queue is a bound on every schedule. A state is left out if another one with as
many first runs has cost no more and has at least the same tensors on the device.

Without times the search only asks whether anything fits. Bisection with it gives the minimum budget
(`least_peak`).

Optimal and proven over all schedules on the device alone that the simulator accepts, in any order
of recomputation. Where it falls short: the states grow exponentially with the tensors that could be
kept. Within MAX_MOVES it solves random graphs of 28 nodes in 0.1 s, two thirds of those with 40
nodes, and chains of sixty nodes at their minimum budget. (`ilp` takes up to half a minute for 28
nodes, and does not always end.)
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.schedule import Schedule, free_after_last_use, simulate, without_dead_computes
from solver.sizes_deadlines_progress import NEVER, Deadline

MAX_NODES = 60
"""Larger graphs are not tried."""
MAX_MOVES = 150_000
"""Limit on the moves that are looked at, about 1.5 s."""
COMPARISONS_PER_MOVE = 30
"""So many comparisons of two states take as long as a move."""
MAX_LEAST_MOVES = 3 * MAX_MOVES
"""Limit on the moves of all searches for the minimum budget."""
WIDE = 0.002
"""Share of the budget up to which bisection goes; then the next smaller budget is tried."""

State = tuple[int, int]
"""Number of first runs, and a mask of the tensors on the device that nodes made."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    proven_s: no schedule recomputes for less (inf: none fits).
    schedule: one that recomputes for as long as that (None: none, or the moves ran out).
    is_complete: whether the moves did not run out.
    n_moves: moves looked at.
    """

    proven_s: float
    schedule: Schedule | None
    is_complete: bool
    n_moves: int


def is_small(graph: Graph) -> bool:
    """Whether the search is worth trying; steps with micro-batches in flight are not."""
    return len(graph.nodes) <= MAX_NODES and graph.n_in_flight <= 1


def fastest_schedule(
    folded: StorageGraph,
    *,
    budget_bytes: int,
    worth_s: float = math.inf,
    deadline: Deadline = NEVER,
) -> Found:
    """The schedule of least recompute time within the budget. Raises OutOfTimeError.

    worth_s: schedules that recompute for longer are of no interest; then proven_s is at most this.
    """
    states = _States(folded, budget_bytes=budget_bytes)
    start = (0, 0)
    cost_s, came = {start: 0.0}, dict[State, tuple[State, int]]()
    # By cost and estimate; among equals the most first runs, then the most tensors.
    queue = [(0.0, 0, 0, 0.0, start)]
    visited = _Visited()
    n_moves = 0
    while queue:
        if n_moves + visited.n_comparisons // COMPARISONS_PER_MOVE > MAX_MOVES:
            return Found(queue[0][0], None, is_complete=False, n_moves=MAX_MOVES)
        proven_s, _, _, spent_s, state = heapq.heappop(queue)
        if states.is_end(state):
            order = without_dead_computes(folded.graph, states.order_to(came, state))
            schedule = free_after_last_use(folded.graph, order)
            return Found(proven_s, schedule, is_complete=True, n_moves=n_moves)
        if spent_s > cost_s[state] or not visited.add(state, spent_s):
            continue
        deadline.check()
        for node, after in states.moves(state):
            n_moves += 1
            total_s = spent_s + (states.time_s[node] if node < state[0] else 0.0)
            if total_s >= cost_s.get(after, math.inf):
                continue
            after_s = total_s + states.least_left_s(after)
            if after_s <= worth_s and after_s < math.inf:
                cost_s[after], came[after] = total_s, (state, node)
                heapq.heappush(queue, (after_s, -after[0], -after[1].bit_count(), total_s, after))
    return Found(worth_s, None, is_complete=True, n_moves=n_moves)


def any_schedule(folded: StorageGraph, *, budget_bytes: int, deadline: Deadline = NEVER) -> Found:
    """Any schedule within the budget: a search without times. Raises OutOfTimeError."""
    timeless = replace(folded, time_s=(0.0,) * folded.n_nodes)
    return fastest_schedule(timeless, budget_bytes=budget_bytes, deadline=deadline)


def least_peak(
    folded: StorageGraph,
    *,
    proven_bytes: int,
    known: tuple[Schedule, int],
    deadline: Deadline = NEVER,
) -> tuple[int, Schedule, int]:
    """The least budget of a small graph: what is proven, and a schedule with its peak.

    They are equal unless the moves run out. Raises OutOfTimeError.

    proven_bytes: no schedule has a smaller peak.
    known: a schedule and its peak.
    """
    schedule, peak_bytes = known
    floor_bytes, n_moves = proven_bytes, 0  # nothing is found below
    while floor_bytes < peak_bytes and n_moves < MAX_LEAST_MOVES:
        is_wide = peak_bytes - floor_bytes > WIDE * peak_bytes
        budget_bytes = (floor_bytes + peak_bytes) // 2 if is_wide else peak_bytes - 1
        found = any_schedule(folded, budget_bytes=budget_bytes, deadline=deadline)
        n_moves += found.n_moves
        if found.schedule is not None:
            schedule = found.schedule
            peak_bytes = simulate(folded.graph, schedule).peak_bytes
            continue
        floor_bytes = budget_bytes + 1
        if found.is_complete:
            proven_bytes = floor_bytes
    return proven_bytes, schedule, peak_bytes


class _Visited:
    """The states from which moves were looked at, without those that another one makes useless."""

    def __init__(self) -> None:
        self._by_first_runs: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.n_comparisons = 0

    def add(self, state: State, spent_s: float) -> bool:
        """Add a state; False if one that cost no more has all of its tensors."""
        n_first_runs, live = state
        others = self._by_first_runs[n_first_runs]
        for i, (other_s, other) in enumerate(others):
            if other_s <= spent_s and not live & ~other:
                self.n_comparisons += i + 1
                return False
        self.n_comparisons += len(others)
        others.append((spent_s, live))
        return True


class _States:
    """The graph in bit masks of the tensors that nodes make, and the moves from state to state."""

    def __init__(self, folded: StorageGraph, *, budget_bytes: int) -> None:
        graph = folded.graph
        self._graph, self._n_nodes = graph, folded.n_nodes
        self.time_s = folded.time_s
        self._bit = {name: 1 << i for i, name in enumerate(graph.producer)}
        self._maker = [folded.position[node.name] for node in graph.producer.values()]
        self._room_bytes = budget_bytes - graph.resident_bytes
        self._reads = [self._mask(node.inputs) for node in graph.nodes]
        self._outputs = [self._mask(node.outputs) for node in graph.nodes]
        self._own_bytes = [int(each) for each in folded.own_bytes]
        self._recomputable = folded.recomputable
        views = {name: graph.views.get(name, ()) for name in folded.unit_names}
        masks = [self._mask((name, *views[name])) for name in folded.unit_names]
        self._storages = list(zip(masks, folded.unit_bytes, strict=True))
        self._replaces = [  # by node, the storages of its outputs, with all views
            sum(masks[u] for u in folded.makes[n]) for n in range(self._n_nodes)
        ]
        self._on = [  # by node, the storages of which one tensor at least must be there
            [masks[u] for u in folded.reads[n] if not masks[u] & self._reads[n]]
            for n in range(self._n_nodes)
        ]
        self._once = sum(
            bit
            for i, bit in enumerate(self._bit.values())
            if not folded.recomputable[self._maker[i]]
        )
        self._needed = self._by_position()
        self._useful = [self._with_inputs_of_makers(p) for p in range(self._n_nodes + 1)]
        self._left_s: dict[State, float] = {}

    def _mask(self, names: tuple[str, ...]) -> int:
        mask = 0
        for name in names:
            mask |= self._bit.get(name, 0)
        return mask

    def _by_position(self) -> list[int]:
        """By position: the tensors made before it that later first runs, or the end, read."""
        made = [0]
        for outputs in self._outputs:
            made.append(made[-1] | outputs)
        needed, read = [], self._mask(self._graph.outputs)
        for p in range(self._n_nodes, -1, -1):
            if p < self._n_nodes:
                read |= self._reads[p]
            needed.append(read & made[p])
        return needed[::-1]

    def _with_inputs_of_makers(self, p: int) -> int:
        """What first runs from position p on need, with all that may be used to recompute it."""
        useful, new = 0, self._needed[p]
        for n in range(p, self._n_nodes):
            new |= sum(self._on[n])
        while new:
            useful |= new
            new = 0
            for i, n in enumerate(self._maker):
                if useful >> i & 1 and self._recomputable[n]:
                    new |= self._reads[n] | sum(self._on[n])
            new &= ~useful
        return useful

    def is_end(self, state: State) -> bool:
        return state[0] == self._n_nodes and not self._needed[-1] & ~state[1]

    def least_left_s(self, state: State) -> float:
        """The least recompute time from this state on (inf: no way leads to the end)."""
        if state not in self._left_s:
            p, live = state
            total_s, missing, seen = 0.0, self._needed[p] & ~live, 0
            while missing:
                bit = missing & -missing
                n = self._maker[bit.bit_length() - 1]
                if not self._recomputable[n]:
                    total_s = math.inf
                    break
                seen |= self._outputs[n]
                total_s += self.time_s[n]
                missing = (missing | self._reads[n] & ~live) & ~seen
            self._left_s[state] = total_s
        return self._left_s[state]

    def moves(self, state: State) -> Iterator[tuple[int, State]]:
        """Yield the node that runs, and the state after it."""
        p, live = state
        for n in range(min(p + 1, self._n_nodes)):
            is_first = n == p
            if not is_first and (
                not self._recomputable[n] or not self._outputs[n] & self._useful[p] & ~live
            ):
                continue
            if self._reads[n] & ~live or any(not storage & live for storage in self._on[n]):
                continue
            before = live if is_first else live & ~self._replaces[n]
            if (live & ~before) & self._once & self._needed[p]:
                continue  # a view that is made only once holds the old storage
            after = p + is_first
            for left in self._with_room_for(n, p, before):
                yield n, (after, (left | self._outputs[n]) & self._useful[after])

    def _with_room_for(self, n: int, p: int, live: int) -> Iterator[int]:
        """Yield what may be on the device before node n runs: all, or all but just enough."""
        missing_bytes = self._own_bytes[n] - self._room_bytes
        freeable: list[tuple[int, int]] = []
        stays = self._reads[n] | sum(self._on[n]) | (self._once & self._needed[p])
        for storage, size_bytes in self._storages:
            here = storage & live
            if here:
                missing_bytes += size_bytes
                if size_bytes and not here & stays:
                    freeable.append((size_bytes, here))
        if missing_bytes <= 0:
            yield live
            return
        freeable.sort(reverse=True)
        yield from _all_but_enough(live, freeable, missing_bytes)

    def order_to(self, came: dict[State, tuple[State, int]], state: State) -> list[str]:
        """Names of the nodes that run on the way to a state."""
        nodes = []
        while state in came:
            state, node = came[state]
            nodes.append(self._graph.nodes[node].name)
        return nodes[::-1]


def _all_but_enough(
    live: int, freeable: list[tuple[int, int]], missing_bytes: int
) -> Iterator[int]:
    """Yield `live` without storages of this size together, in all ways that free none too many.

    freeable: (bytes, tensors), the largest first: so the last one freed is the smallest.
    """
    left_bytes = sum(size_bytes for size_bytes, _ in freeable)
    for i, (size_bytes, tensors) in enumerate(freeable):
        if left_bytes < missing_bytes:
            return
        left_bytes -= size_bytes
        if size_bytes >= missing_bytes:
            yield live & ~tensors
        else:
            yield from _all_but_enough(
                live & ~tensors, freeable[i + 1 :], missing_bytes - size_bytes
            )
