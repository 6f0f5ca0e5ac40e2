"""From what is kept at certain positions to a schedule: recompute just in time, drop at the
positions.

The cuts say what the device holds at each position. The replay runs the step in order; at a
position it forgets the forward units that the cut does not hold; before each op it recomputes what
is missing, with whatever that needs in turn. It loses at most the recompute time that the cuts
counted. Whether it fits between the positions is for the simulator to say: `FoldedSimulation` folds
its trace back onto the positions, so that the next cuts know where it overflows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from solver.bound import StorageGraph
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
    """The schedule that holds these units at these positions; see the module.

    Raises OutOfTimeError.
    """
    graph = folded.graph
    available = {tensor.name for tensor in graph.resident}
    order = just_in_time(folded, kept, range(folded.n_nodes), available, deadline=deadline)
    order.extend(missing_computes(graph, graph.outputs, available))
    return free_after_last_use(graph, without_dead_computes(graph, order))


def just_in_time(
    folded: StorageGraph,
    kept: Mapping[int, Collection[int]],
    positions: range,
    available: set[str],
    *,
    deadline: Deadline = NEVER,
) -> list[str]:
    """What runs from the first of these positions to the last, each node's recomputation before it.

    available: tensors that are there when it begins; updated. Raises OutOfTimeError.
    """
    graph = folded.graph
    order: list[str] = []
    for p in positions:
        deadline.check()
        node = graph.nodes[p]
        if p in kept:
            # What the next position holds was made before it: its inputs may be gone afterwards.
            held = [folded.unit_names[u] for u in sorted(kept[p])]
            order.extend(missing_computes(graph, held, available))
            available.difference_update(names_let_go(folded, kept[p], p))
        order.extend(missing_computes(graph, folded.needed_names(p), available))
        order.append(node.name)
        available.update(node.outputs)
    return order


def names_let_go(folded: StorageGraph, kept: Collection[int], p: int) -> Iterator[str]:
    """Tensors that the device need not hold at position p, if it holds these forward units."""
    for u, maker in enumerate(folded.maker):
        if maker >= min(p, folded.n_forward):
            return
        if u not in kept and not folded.is_pinned(u, p) and folded.recomputable[maker]:
            storage = folded.unit_names[u]
            yield storage
            yield from folded.graph.views.get(storage, ())


@dataclass(frozen=True)
class FoldedSimulation:
    """A schedule with its simulation, and the most bytes by position.

    stage_bytes: by position p, the most on the device from the end of node p - 1's first run to the
    end of node p's: p itself and the recomputation before it. recomputed: (node, p) for every node
    that is recomputed between the two.
    """

    schedule: Schedule
    simulation: Simulation
    stage_bytes: tuple[int, ...]
    recomputed: frozenset[tuple[int, int]]

    def overflowing(
        self, budget_bytes: int, *, n_most: int, distance: int, but: Collection[int] = ()
    ) -> list[int]:
        """Positions, the furthest above the budget first, further apart than this distance."""
        chosen: list[int] = []
        for p in sorted(range(len(self.stage_bytes)), key=lambda p: (-self.stage_bytes[p], p)):
            if self.stage_bytes[p] <= budget_bytes or len(chosen) == n_most:
                break
            if p not in but and all(abs(p - q) > distance for q in chosen):
                chosen.append(p)
        return chosen


def fold_simulation(folded: StorageGraph, schedule: Schedule) -> FoldedSimulation:
    """Simulate the schedule and fold the trace onto the positions; the last one is the end."""
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
