"""A plan explained: why an op runs again, what is on the device at the peak, what a byte is worth.

Nothing is taken from the search: the schedule is read, changed by hand where a question asks what
would be otherwise, and judged again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from graphs.graph import Graph, Node
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
"""A budget's step is a gigabyte, but at most this part of what the step has above the resident."""


@dataclass(frozen=True)
class Recomputation:
    """One run beyond the first.

    dropped_after: the last op that reads what it made before, or the op itself if none does.
    reader: the op that is not itself a recomputation and for whose sake it runs; None: nothing
    reads it further on. through: recomputations between the two, in order.
    """

    dropped_after: Node
    reader: Node | None
    through: tuple[Node, ...]


@dataclass(frozen=True)
class WhyRecomputed:
    """An op in a plan.

    output_bytes: what it makes, aliases not counted. last_reader: the last op that reads it. kept:
    the judge's word on the same plan with the output kept from its first use to its last (None: it
    does not run again, or keeping it is not legal).
    """

    node: Node
    n_runs: int
    output_bytes: int
    reruns: tuple[Recomputation, ...]
    last_reader: Node | None
    kept: Simulation | None


@dataclass(frozen=True)
class Peak:
    """The moment of the peak. node: None before the first op. position: of n_ops computes, from 1.

    memory_bytes: by category. largest: what the step made and is there, (storage, bytes), largest
    first. modules: of the ops that made them. resident_bytes: what no plan can free.
    """

    node: Node | None
    position: int
    n_ops: int
    memory_bytes: dict[str, int]
    largest: tuple[tuple[str, int], ...]
    modules: dict[str, str]
    resident_bytes: int


def why_recomputed(solution: Solution, name: str) -> WhyRecomputed:
    """Why the op of that name runs as often as it does. Raises KeyError: the graph has no such op.

    Cost: linear in the schedule.
    """
    graph, schedule = solution.graph, _schedule(solution)
    node = graph.node_by_name[name]
    order = computes(schedule)
    runs = [position for position, other in enumerate(order) if other == name]
    again = _is_rerun(order)
    readers = [other for other in order if _reads(graph, other, node)]
    return WhyRecomputed(
        node=node,
        n_runs=len(runs),
        output_bytes=sum(
            graph.tensor_by_name[output].size_bytes
            for output in node.outputs
            if graph.root(output) == output
        ),
        reruns=tuple(
            _rerun(graph, order, again, before, position) for before, position in pairwise(runs)
        ),
        last_reader=graph.node_by_name[readers[-1]] if readers else None,
        kept=_kept(graph, order, name) if len(runs) > 1 else None,
    )


def peak(solution: Solution) -> Peak:
    """Where the plan's peak is, and what stands there."""
    graph, schedule, simulation = solution.graph, _schedule(solution), _trace(solution)
    node = node_at(graph, schedule, simulation)
    held = held_during(graph, schedule, simulation.peak_op)
    sizes = ((root, graph.tensor_by_name[root].size_bytes) for root in held)
    before = schedule.ops[: 0 if simulation.peak_op is None else simulation.peak_op + 1]
    return Peak(
        node=node,
        position=sum(isinstance(op, Compute) for op in before),
        n_ops=len(computes(schedule)),
        memory_bytes=memory_at(graph, schedule, simulation.peak_op),
        largest=tuple(sorted(sizes, key=lambda item: (-item[1], item[0]))),
        modules={root: graph.producer[root].module for root in held},
        resident_bytes=graph.resident_bytes,
    )


def most_recomputed(solution: Solution) -> tuple[tuple[Node, int], ...]:
    """The ops that run again and how often beyond the first, most time lost first."""
    runs = Counter(computes(_schedule(solution)))
    graph = solution.graph
    found = [(graph.node_by_name[name], n - 1) for name, n in runs.items() if n > 1]
    return tuple(sorted(found, key=lambda item: (-item[0].time_s * item[1], item[0].name)))


def neighbours(
    solution: Solution, *, step_bytes: int, time_limit_s: float
) -> tuple[Solution | None, Solution]:
    """The same request with a step less and a step more; None where less leaves nothing to plan.

    Each search takes at most time_limit_s. The plan itself fits the larger budget, so that answer
    is never worse.
    """
    request = solution.request
    answers: list[Solution | None] = []
    for budget_bytes in (request.budget_bytes - step_bytes, request.budget_bytes + step_bytes):
        asked = dataclasses.replace(
            request, budget_bytes=budget_bytes, time_limit_s=time_limit_s, method=solution.method
        )
        answers.append(attempt(solution.graph, asked) if asked.available_bytes > 0 else None)
    less, more = answers
    assert more is not None
    if more.simulation is None or more.simulation.time_s > _trace(solution).time_s:
        more = dataclasses.replace(more, schedule=solution.schedule, simulation=solution.simulation)
    return less, more.with_bound(more.lower_bound_s)


def step_bytes_for(solution: Solution) -> int:
    """A step that tells something: 1 GB, or a tenth of what the step has above the resident."""
    above_bytes = solution.baseline.peak_bytes - solution.graph.resident_bytes
    return max(1, min(STEP_BYTES, above_bytes // STEP_SHARE))


def computes(schedule: Schedule) -> list[str]:
    """The nodes in the order in which they run."""
    return [op.node for op in schedule.ops if isinstance(op, Compute)]


def _rerun(
    graph: Graph, order: Sequence[str], again: Sequence[bool], before: int, position: int
) -> Recomputation:
    """The run at `position`; the one before it was at `before`."""
    node = graph.node_by_name[order[position]]
    readers = [p for p in range(before + 1, position) if _reads(graph, order[p], node)]
    through: list[Node] = []
    reader: Node | None = None
    at, wanted = position, node
    while reader is None:
        found = next(
            (p for p in range(at + 1, len(order)) if _reads(graph, order[p], wanted)), None
        )
        if found is None:
            break
        at, wanted = found, graph.node_by_name[order[found]]
        if again[found]:
            through.append(wanted)
        else:
            reader = wanted
    return Recomputation(
        dropped_after=graph.node_by_name[order[readers[-1]]] if readers else node,
        reader=reader,
        through=tuple(through),
    )


def _reads(graph: Graph, reader: str, maker: Node) -> bool:
    made = set(map(graph.root, maker.outputs))
    return not made.isdisjoint(map(graph.root, graph.node_by_name[reader].inputs))


def _is_rerun(order: Sequence[str]) -> list[bool]:
    seen: set[str] = set()
    flags = []
    for name in order:
        flags.append(name in seen)
        seen.add(name)
    return flags


def _kept(graph: Graph, order: Sequence[str], name: str) -> Simulation | None:
    """The plan without the later runs of one op, and without what ran for their sake alone."""
    first = order.index(name)
    once = [other for position, other in enumerate(order) if other != name or position == first]
    try:
        return simulate(graph, free_after_last_use(graph, without_dead_computes(graph, once)))
    except IllegalScheduleError:
        return None


def _schedule(solution: Solution) -> Schedule:
    if solution.schedule is None:
        raise ValueError(f"there is no schedule to explain: the status is {solution.status}")
    return solution.schedule


def _trace(solution: Solution) -> Simulation:
    if solution.simulation is None:
        raise ValueError(f"there is no schedule to explain: the status is {solution.status}")
    return solution.simulation
