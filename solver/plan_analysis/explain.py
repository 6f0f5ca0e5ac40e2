"""Explain a plan: why an op is recomputed, what is live at the peak, what more memory would save.

Answers come from the schedule. For some "what if" questions it is edited and simulated again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphs.graph import Graph, Node
from solver.methods import METHODS
from solver.schedule import (
    Compute,
    Schedule,
    Simulation,
    Solution,
    free_after_last_use,
    held_during,
    memory_at,
    node_at,
    simulate_if_legal,
    without_dead_computes,
)
from solver.solving import attempt

STEP_BYTES = 10**9
STEP_SHARE = 10
"""The step to a smaller and a larger budget is STEP_BYTES, but at most 1/STEP_SHARE of the
non-resident part of the baseline's peak."""


@dataclass(frozen=True)
class Recomputation:
    """One computation of an op beyond its first.

    dropped_after: the last op that reads the previous result, or the op itself if none does.
    reader: the op that this recomputation is for, which is not recomputed itself (None: nothing
        reads the result).
    through: further recomputations in between, in order: each reads the one before.
    """

    dropped_after: Node
    reader: Node | None
    through: tuple[Node, ...]


@dataclass(frozen=True)
class WhyRecomputed:
    """Why and how often a plan recomputes an op.

    n_runs: how often it runs in all.
    output_bytes: bytes of its outputs, without aliases of other storages.
    recomputations: the computations beyond the first.
    last_reader: the last op that reads the output (None: none does).
    kept: the simulation of the plan with the output kept until then (None: the op is not
        recomputed, keeping the output is illegal, or the plan has copies, which would have to be
        planned anew).
    """

    node: Node
    n_runs: int
    output_bytes: int
    recomputations: tuple[Recomputation, ...]
    last_reader: Node | None
    kept: Simulation | None


@dataclass(frozen=True)
class Peak:
    """The peak of a plan.

    node: the peak op (None: before the first op).
    position: its number among the plan's `n_ops` computes, from 1.
    memory_bytes: category -> bytes.
    largest: (storage, bytes) of the live storages that the step makes, largest first.
    modules: storage -> module of the op that makes it.
    resident_bytes: bytes that no plan can free.
    """

    node: Node | None
    position: int
    n_ops: int
    memory_bytes: dict[str, int]
    largest: tuple[tuple[str, int], ...]
    modules: dict[str, str]
    resident_bytes: int


def why_recomputed(solution: Solution, name: str) -> WhyRecomputed:
    """Explain why the op of this name is recomputed.

    Raises KeyError for an unknown name, and ValueError if there is no schedule.
    """
    graph, schedule = solution.graph, _plan_of(solution)[0]
    order, has_copies = schedule.order, schedule.has_copies
    node = graph.node_by_name[name]
    runs = [position for position, other in enumerate(order) if other == name]
    first = {name: position for position, name in reversed([*enumerate(order)])}
    is_recomputed = [first[name] < position for position, name in enumerate(order)]
    readers = [other for other in order if _reads(graph, other, node)]
    return WhyRecomputed(
        node=node,
        n_runs=len(runs),
        output_bytes=sum(
            graph.tensor_by_name[output].size_bytes
            for output in node.outputs
            if graph.root(output) == output
        ),
        recomputations=tuple(
            _recomputation(graph, order, is_recomputed, before, position)
            for before, position in pairwise(runs)
        ),
        last_reader=graph.node_by_name[readers[-1]] if readers else None,
        kept=None if len(runs) == 1 or has_copies else _simulate_keeping(graph, order, name),
    )


def peak(solution: Solution) -> Peak:
    """The peak of the plan and what is live there. Raises ValueError if there is no schedule."""
    graph, (schedule, simulation) = solution.graph, _plan_of(solution)
    node = node_at(graph, schedule, simulation)
    held = held_during(graph, schedule, simulation.peak_op)
    sizes = ((root, graph.tensor_by_name[root].size_bytes) for root in held)
    before = schedule.ops[: 0 if simulation.peak_op is None else simulation.peak_op + 1]
    return Peak(
        node=node,
        position=sum(isinstance(op, Compute) for op in before),
        n_ops=len(schedule.order),
        memory_bytes=memory_at(graph, schedule, simulation.peak_op),
        largest=tuple(sorted(sizes, key=lambda item: (-item[1], item[0]))),
        modules={root: graph.producer[root].module for root in held},
        resident_bytes=graph.resident_bytes,
    )


def most_recomputed(solution: Solution) -> tuple[tuple[Node, int], ...]:
    """(op, number of recomputes) of all recomputed ops, the one with the most recompute time first.

    Raises ValueError if there is no schedule.
    """
    runs = Counter(_plan_of(solution)[0].order)
    graph = solution.graph
    found = [(graph.node_by_name[name], n - 1) for name, n in runs.items() if n > 1]
    return tuple(sorted(found, key=lambda item: (-item[0].time_s * item[1], item[0].name)))


def neighbours(
    solution: Solution, *, step_bytes: int, time_limit_s: float
) -> tuple[Solution | None, Solution]:
    """Solutions for a smaller and a larger budget.

    step_bytes: how much smaller and larger.
    time_limit_s: for each of the two searches.

    The first is None if the smaller budget leaves nothing beyond the reserve. The second is never
    slower than the given plan, which fits the larger budget as well.
    """
    request = solution.request
    method = solution.method if solution.method in METHODS else "auto"  # a file may name any
    answers: list[Solution | None] = []
    for budget_bytes in (request.budget_bytes - step_bytes, request.budget_bytes + step_bytes):
        changed_request = dataclasses.replace(
            request, budget_bytes=budget_bytes, time_limit_s=time_limit_s, method=method
        )
        fits = changed_request.available_bytes > 0
        answers.append(attempt(solution.step, changed_request) if fits else None)
    less, more = answers
    assert more is not None
    if more.simulation is None or more.simulation.time_s > _plan_of(solution)[1].time_s:
        more = dataclasses.replace(
            more,
            graph=solution.graph,
            schedule=solution.schedule,
            simulation=solution.simulation,
        )
    return less, more.with_bound(more.lower_bound_s)


def step_bytes_for(solution: Solution) -> int:
    """The step to other budgets: 1 GB, or a tenth of the baseline's non-resident peak if less."""
    above_bytes = solution.baseline.peak_bytes - solution.graph.resident_bytes
    return max(1, min(STEP_BYTES, above_bytes // STEP_SHARE))


def _recomputation(
    graph: Graph, order: Sequence[str], is_recomputed: Sequence[bool], before: int, position: int
) -> Recomputation:
    """Explain the recomputation at `position` of the order; the previous run is at `before`.

    is_recomputed: for each position, whether it is not its node's first run.
    """
    node = graph.node_by_name[order[position]]
    readers = [p for p in range(before + 1, position) if _reads(graph, order[p], node)]
    through: list[Node] = []
    reader, maker = None, node
    # Follow the chain of recomputations that read each other, up to an op that runs the first time.
    for at in range(position + 1, len(order)):
        if not _reads(graph, order[at], maker):
            continue
        maker = graph.node_by_name[order[at]]
        if not is_recomputed[at]:
            reader = maker
            break
        through.append(maker)
    return Recomputation(
        dropped_after=graph.node_by_name[order[readers[-1]]] if readers else node,
        reader=reader,
        through=tuple(through),
    )


def _reads(graph: Graph, reader: str, maker: Node) -> bool:
    """Whether a node reads the storage of any output of `maker`."""
    made = set(map(graph.root, maker.outputs))
    return not made.isdisjoint(map(graph.root, graph.node_by_name[reader].inputs))


def _simulate_keeping(graph: Graph, order: Sequence[str], name: str) -> Simulation | None:
    """Simulate the plan without the recomputations of one op, and without those that only they
    need (None: that is illegal)."""
    first = order.index(name)
    once = [other for position, other in enumerate(order) if other != name or position == first]
    schedule = free_after_last_use(graph, without_dead_computes(graph, once))
    return simulate_if_legal(graph, schedule)


def _plan_of(solution: Solution) -> tuple[Schedule, Simulation]:
    """The schedule and its simulation. Raises ValueError if there is none."""
    if solution.schedule is None or solution.simulation is None:
        raise ValueError(f"no schedule to explain: the status is {solution.status}")
    return solution.schedule, solution.simulation
