"""Turn what cuts keep at certain positions into a schedule that recomputes just in time.

Cuts say what the device holds at each of their positions. The schedule runs the step in order. At a
position it drops the forward units that the cut does not hold; before each op it recomputes missing
inputs, recursively. It loses at most the recompute time that the cuts counted. Only the simulator
says whether it fits between the positions: `FoldedSimulation` maps its trace onto the positions, so
that the next cuts know where the budget is exceeded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from solver.bound import StorageGraph, spread_out
from solver.schedule import (
    Compute,
    Schedule,
    Simulation,
    free_after_last_use,
    missing_computes,
    simulate,
    without_dead_computes,
)
from solver.sizes_deadlines_progress import NEVER, Deadline


def schedule_from_cuts(
    folded: StorageGraph, kept: Mapping[int, Collection[int]], *, deadline: Deadline = NEVER
) -> Schedule:
    """The schedule that holds these units at these positions.

    kept: by position, the forward units to hold there.

    Raises OutOfTimeError.
    """
    graph = folded.graph
    available = {tensor.name for tensor in graph.resident}
    order = order_just_in_time(folded, kept, range(folded.n_nodes), available, deadline=deadline)
    order.extend(missing_computes(graph, graph.outputs, available))
    return free_after_last_use(graph, without_dead_computes(graph, order))


def order_just_in_time(
    folded: StorageGraph,
    kept: Mapping[int, Collection[int]],
    positions: range,
    available: set[str],
    *,
    deadline: Deadline = NEVER,
) -> list[str]:
    """Names of the nodes to run for these positions: each node, with its recomputation before it.

    available: tensors on the device when the first position begins; updated.

    Raises OutOfTimeError.
    """
    graph = folded.graph
    order: list[str] = []
    for p in positions:
        deadline.check()
        node = graph.nodes[p]
        if p in kept:
            # Recompute what is held here before the inputs for that are dropped.
            held = [folded.unit_names[u] for u in sorted(kept[p])]
            order.extend(missing_computes(graph, held, available))
            available.difference_update(droppable_names(folded, kept[p], p))
        order.extend(missing_computes(graph, folded.needed_names(p), available))
        order.append(node.name)
        available.update(node.outputs)
    return order


def droppable_names(folded: StorageGraph, kept: Collection[int], p: int) -> Iterator[str]:
    """Names of the tensors that can be dropped at position p if these forward units are held."""
    for u, maker in enumerate(folded.maker):
        if maker >= min(p, folded.n_forward):
            return
        if u not in kept and not folded.is_pinned(u, p) and folded.recomputable[maker]:
            storage = folded.unit_names[u]
            yield storage
            yield from folded.graph.views.get(storage, ())


@dataclass(frozen=True)
class FoldedSimulation:
    """A schedule with its simulation, mapped onto positions.

    stage_bytes: by position p, the most bytes on the device after the first run of node p - 1 and
        up to the end of that of node p, which includes the recomputation before p.
    recomputed: (node, p) for every node that is recomputed between those two first runs.
    """

    schedule: Schedule
    simulation: Simulation
    stage_bytes: tuple[int, ...]
    recomputed: frozenset[tuple[int, int]]

    def overflowing_positions(
        self, budget_bytes: int, *, n_most: int, distance: int, excluded: Collection[int] = ()
    ) -> list[int]:
        """Positions above the budget, the fullest first, at most n_most.

        distance: the positions are further apart than this.
        excluded: positions to leave out.
        """
        over_budget = [
            p
            for p, held_bytes in enumerate(self.stage_bytes)
            if held_bytes > budget_bytes and p not in excluded
        ]
        fullest_first = sorted(over_budget, key=lambda p: (-self.stage_bytes[p], p))
        return spread_out(fullest_first, n_most, distance=distance)


def fold_simulation(folded: StorageGraph, schedule: Schedule) -> FoldedSimulation:
    """Simulate the schedule and map its trace onto positions; the last one is the end of the step.

    Raises IllegalScheduleError.
    """
    simulation = simulate(folded.graph, schedule)
    stage = [0] * (folded.n_nodes + 1)
    recomputed: set[tuple[int, int]] = set()
    ran: set[str] = set()
    for op, live_bytes in zip(schedule.ops, simulation.live_bytes, strict=True):
        p = len(ran)
        stage[p] = max(stage[p], live_bytes)
        if isinstance(op, Compute):
            if op.node in ran:
                recomputed.add((folded.position[op.node], p))
            ran.add(op.node)
    return FoldedSimulation(schedule, simulation, tuple(stage), frozenset(recomputed))
