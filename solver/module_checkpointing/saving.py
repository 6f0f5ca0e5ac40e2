"""Which results checkpointed regions keep, within a budget.

A selective checkpoint recomputes all of its region but what it saves, needed or not (rule 3 of
`regions`). So saving an operator is worth its seconds, whatever else is saved, even where the
backward pass never reads its result; and it costs the bytes of its results, unless these stay
anyway. That is a knapsack: operators in the order of bytes per second, as many of the first as fit,
then those of the others that still do. What fits is decided by simulating the step.

A region of which nothing is dropped any more is left out.

Optimal for nothing: the peak is not the sum of what is saved.

Cost: about log2(operators) simulations, and at most N_MORE * log2(operators) after them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphs.graph import Graph
from solver.module_checkpointing.regions import CheckpointRegion, RegionLayout

N_MORE = 4
"""Operators that did not fit and are passed over."""

MaySave: TypeAlias = Callable[[CheckpointRegion], frozenset[str]]
"""Of the operators that a region would save, those whose results the framework can save."""


@dataclass(frozen=True)
class Saving:
    """What regions may save.

    regions: disjoint, without regions inside.
    needed: by region, the makers of what it drops and its backward needs.
    order: nodes whose results may be kept, the cheapest bytes per second saved first; of equal ones
        those of later regions first, which the backward pass reaches earlier.
    """

    regions: tuple[CheckpointRegion, ...]
    needed: tuple[frozenset[str], ...]
    order: tuple[str, ...]
    may_save: MaySave

    @classmethod
    def of(
        cls,
        graph: Graph,
        regions: Sequence[tuple[CheckpointRegion, tuple[str, ...]]],
        may_save: MaySave,
    ) -> Saving:
        """regions: each with the tensors that it drops (`dropped_by`)."""
        price: dict[str, tuple[float, int]] = {}
        for position, (region, _) in enumerate(regions):
            layout = RegionLayout(graph, (region,))
            everything = dataclasses.replace(region, saved=frozenset(region.nodes))
            for name in may_save(everything):
                node = graph.node_by_name[name]
                added = {graph.root(out) for out in node.outputs if 0 not in layout.homes(out)}
                added_bytes = sum(graph.tensor_by_name[out].size_bytes for out in added)
                if node.time_s > 0:
                    price[name] = added_bytes / node.time_s, -position
        return cls(
            regions=tuple(region for region, _ in regions),
            needed=tuple(
                frozenset(graph.producer[name].name for name in dropped) for _, dropped in regions
            ),
            order=tuple(sorted(price, key=lambda name: (*price[name], name))),
            may_save=may_save,
        )

    def with_saved(self, names: frozenset[str]) -> Iterator[CheckpointRegion]:
        """The regions that save these nodes, as far as they can."""
        for region, needed in zip(self.regions, self.needed, strict=True):
            chosen = dataclasses.replace(region, saved=names.intersection(region.nodes))
            saved = self.may_save(chosen) if chosen.saved else frozenset()
            if not needed <= saved:
                yield dataclasses.replace(region, saved=saved)


def save_what_fits(
    saving: Saving, excess_bytes: Callable[[Sequence[CheckpointRegion]], int]
) -> None:
    """Try regions that save as much as fits.

    excess_bytes: by how much a choice of regions is above the budget; it remembers the best.
    """

    def fits(names: Sequence[str]) -> bool:
        return excess_bytes(list(saving.with_saved(frozenset(names)))) <= 0

    saved: list[str] = []
    left = list(saving.order)
    if not fits(saved):
        return
    for _ in range(1 + N_MORE):
        low, high = 0, len(left)  # that many more fit; more than that many do not
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits([*saved, *left[:middle]]) else (low, middle - 1)
        saved += left[:low]
        left = left[low + 1 :]
        if not left:
            break
