"""Explain a plan: why an op is recomputed, what is live at the peak, what more memory is worth.

All answers come from the schedule; for "what if" questions it is edited and simulated again.
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
    IllegalScheduleError,
    Schedule,
    Simulation,
    Solution,
    free_after_last_use,
    held_during,
    memory_at,
    node_at,
    simulate,
    without_dead_computes,
)
from solver.solving import attempt

STEP_BYTES = 10**9
STEP_SHARE = 10
"""The step between budgets is 1 GB, but at most a tenth of the non-resident memory."""


@dataclass(frozen=True)
class Recomputation:
    """One computation beyond the first.

    dropped_after: the last op that reads the previous copy, or the op itself if none does.
    reader: the op, itself not a recomputation, that needs it; None: nothing reads it.
    through: the recomputations between the two, in order.
    """

    dropped_after: Node
    reader: Node | None
    through: tuple[Node, ...]


@dataclass(frozen=True)
class WhyRecomputed:
    """An op in a plan.

    output_bytes: without aliases.
    last_reader: the last op that reads the output.
    kept: the simulation of the plan with the output kept until then (None: it is not recomputed,
        keeping it is illegal, or the plan has copies, which would be others then).
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
    position: of n_ops computes, from 1.
    memory_bytes: by category.
    largest: live storages that the step produces and their bytes, largest first.
    modules: of the ops that produce them.
    resident_bytes: what no plan can free.
    """

    node: Node | None
    position: int
    n_ops: int
    memory_bytes: dict[str, int]
    largest: tuple[tuple[str, int], ...]
    modules: dict[str, str]
    resident_bytes: int


def why_recomputed(solution: Solution, name: str) -> WhyRecomputed:
    """Why an op is recomputed, by its name; linear in the schedule. Raises KeyError."""
    graph, schedule = solution.graph, _plan(solution)[0]
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
        kept=None if len(runs) == 1 or has_copies else _kept(graph, order, name),
    )


def peak(solution: Solution) -> Peak:
    """The peak of the plan and what is live there."""
    graph, (schedule, simulation) = solution.graph, _plan(solution)
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
    """The recomputed ops and how often, those with the most recompute time first."""
    runs = Counter(_plan(solution)[0].order)
    graph = solution.graph
    found = [(graph.node_by_name[name], n - 1) for name, n in runs.items() if n > 1]
    return tuple(sorted(found, key=lambda item: (-item[0].time_s * item[1], item[0].name)))


def neighbours(
    solution: Solution, *, step_bytes: int, time_limit_s: float
) -> tuple[Solution | None, Solution]:
    """Solutions for a smaller and a larger budget; None where less leaves nothing to plan with.

    Each search takes at most time_limit_s. The answer for more is never slower than the plan, which
    fits there as well.
    """
    request = solution.request
    method = solution.method if solution.method in METHODS else "auto"  # a file may name any
    answers: list[Solution | None] = []
    for budget_bytes in (request.budget_bytes - step_bytes, request.budget_bytes + step_bytes):
        asked = dataclasses.replace(
            request, budget_bytes=budget_bytes, time_limit_s=time_limit_s, method=method
        )
        step = solution.variants or solution.graph
        answers.append(attempt(step, asked) if asked.available_bytes > 0 else None)
    less, more = answers
    assert more is not None
    if more.simulation is None or more.simulation.time_s > _plan(solution)[1].time_s:
        more = dataclasses.replace(
            more,
            graph=solution.graph,
            schedule=solution.schedule,
            simulation=solution.simulation,
        )
    return less, more.with_bound(more.lower_bound_s)


def step_bytes_for(solution: Solution) -> int:
    """A step between budgets: 1 GB, or a tenth of the baseline's non-resident peak if less."""
    above_bytes = solution.baseline.peak_bytes - solution.graph.resident_bytes
    return max(1, min(STEP_BYTES, above_bytes // STEP_SHARE))


def _recomputation(
    graph: Graph, order: Sequence[str], is_recomputed: Sequence[bool], before: int, position: int
) -> Recomputation:
    """The computation at `position`, whose previous one is at `before`."""
    node = graph.node_by_name[order[position]]
    readers = [p for p in range(before + 1, position) if _reads(graph, order[p], node)]
    through: list[Node] = []
    reader, wanted = None, node
    for at in range(position + 1, len(order)):
        if not _reads(graph, order[at], wanted):
            continue
        wanted = graph.node_by_name[order[at]]
        if not is_recomputed[at]:
            reader = wanted
            break
        through.append(wanted)
    return Recomputation(
        dropped_after=graph.node_by_name[order[readers[-1]]] if readers else node,
        reader=reader,
        through=tuple(through),
    )


def _reads(graph: Graph, reader: str, maker: Node) -> bool:
    made = set(map(graph.root, maker.outputs))
    return not made.isdisjoint(map(graph.root, graph.node_by_name[reader].inputs))


def _kept(graph: Graph, order: Sequence[str], name: str) -> Simulation | None:
    """The plan without the recomputations of one op and those needed only for them."""
    first = order.index(name)
    once = [other for position, other in enumerate(order) if other != name or position == first]
    try:
        return simulate(graph, free_after_last_use(graph, without_dead_computes(graph, once)))
    except IllegalScheduleError:
        return None


def _plan(solution: Solution) -> tuple[Schedule, Simulation]:
    if solution.schedule is None or solution.simulation is None:
        raise ValueError(f"no schedule to explain: the status is {solution.status}")
    return solution.schedule, solution.simulation
