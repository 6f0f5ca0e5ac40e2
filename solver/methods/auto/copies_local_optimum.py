"""Local search between recomputation and copies, judged by the time of the step.

Start from an order of nodes that includes recomputation, with copies of the storages that exceed
the budget. Then remove one recomputation, or recompute one copied storage instead, as long as that
makes the step faster. Recomputations are removed in order of their time, longest first; copies are
replaced in order of how long the compute stream waits for them. Work is counted in nodes placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from solver.bound import StorageGraph
from solver.methods.auto.copy_placement import Gap
from solver.methods.auto.runs import Runs
from solver.schedule import missing_computes, without_dead_computes

LEAST_GAIN = 1e-9
"""A step faster by less than this share of its time is not an improvement."""

PlaceCopies: TypeAlias = Callable[[Sequence[str]], "Attempt | None"]
"""An order, with copies where it exceeds the budget; None: it does not fit."""


@dataclass(frozen=True)
class Attempt:
    """An order that fits with copies.

    gaps: the gaps in it that are spent on the host.
    waits_s: by unit, how long the compute stream waits for its copies.
    time_s: of the schedule.
    """

    order: Sequence[str]
    gaps: Sequence[Gap]
    waits_s: Mapping[int, float]
    time_s: float


def climb(folded: StorageGraph, place: PlaceCopies, start: Attempt, *, max_work: int) -> Attempt:
    """The best attempt that single changes lead to, within max_work."""
    best, work = start, 0
    while True:
        for order in _neighbouring_orders(folded, best):
            work += len(order)
            if work > max_work:
                return best
            if math.fsum(folded.graph.node_by_name[name].time_s for name in order) >= best.time_s:
                continue
            found = place(order)
            if found is not None and found.time_s < best.time_s * (1 - LEAST_GAIN):
                best = found
                break
        else:
            return best


def _neighbouring_orders(folded: StorageGraph, best: Attempt) -> Iterator[Sequence[str]]:
    """Yield orders without one of the recomputations, then orders that recompute a copied storage.

    The storage is recomputed right before the use for which it would be fetched.
    """
    graph, order = folded.graph, best.order
    for i in sorted(
        Runs(folded, order).repeats, key=lambda i: (-graph.node_by_name[order[i]].time_s, i)
    ):
        # without_dead_computes also removes what was recomputed only for it
        yield without_dead_computes(graph, [*order[:i], *order[i + 1 :]])
    for gap in sorted(best.gaps, key=lambda gap: (-best.waits_s.get(gap.unit, 0.0), gap)):
        maker = folded.maker[gap.unit]
        if maker >= folded.n_forward or not folded.recomputable[maker]:
            continue
        storage = folded.unit_names[gap.unit]
        tensors_on_storage = {storage, *graph.views.get(storage, ())}
        before, after = order[: gap.last], order[gap.last :]
        made = {name for node in before for name in graph.node_by_name[node].outputs}
        read = {name for node in after for name in graph.needs[node]}
        # its inputs are tensors that are live there, or are recomputed too
        available = {tensor.name for tensor in graph.resident} | (made & read) - tensors_on_storage
        recomputation = missing_computes(graph, sorted(tensors_on_storage & read & made), available)
        yield [*before, *recomputation, *after]
