"""Which results checkpointed regions keep, within a budget.

What a region keeps spares it the operators that go into nothing else (`Recomputation`). So of each
region the results are listed in the order in which they are worth keeping: the one that takes the
fewest bytes for each second that it spares, given those before it in the list. The lists are merged
by the same price, and as many of the first as fit are kept, then those of the others that still
fit. What fits is decided by simulating the step.

A region of which nothing is dropped any more is left out.

Optimal for nothing: the peak is not the sum of what is saved.

Cost: for a region of n operators n^2 looks at what it recomputes; then about log2(operators)
simulations, and at most N_MORE * log2(operators) after them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from graphs.graph import Graph
from solver.module_checkpointing.recomputation import Recomputation
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
    order: nodes whose results may be kept, the cheapest bytes per second spared first; of equal
        ones those of later regions first, which the backward pass reaches earlier.
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
        prices: dict[tuple[str, ...], Mapping[str, float]],
    ) -> Saving:
        """regions: each with the tensors that it drops (`dropped_by`). prices: by nodes of a region
        (`prices_of`), those that are known; the others are added."""
        keys: dict[str, tuple[float, int]] = {}
        for position, (region, _) in enumerate(regions):
            if region.nodes not in prices:
                prices[region.nodes] = prices_of(graph, region, may_save)
            keys |= {name: (each, -position) for name, each in prices[region.nodes].items()}
        return cls(
            regions=tuple(region for region, _ in regions),
            needed=tuple(
                frozenset(graph.producer[name].name for name in dropped) for _, dropped in regions
            ),
            order=tuple(sorted(keys, key=keys.__getitem__)),
            may_save=may_save,
        )

    def with_saved(self, names: frozenset[str]) -> Iterator[CheckpointRegion]:
        """The regions that save these nodes, as far as they can."""
        for region, needed in zip(self.regions, self.needed, strict=True):
            chosen = dataclasses.replace(region, saved=names.intersection(region.nodes))
            saved = self.may_save(chosen) if chosen.saved else frozenset()
            if not needed <= saved:
                yield dataclasses.replace(region, saved=saved)


def prices_of(graph: Graph, region: CheckpointRegion, may_save: MaySave) -> dict[str, float]:
    """Nodes of the region in the order in which they are worth saving, with bytes per second."""
    layout = RegionLayout(graph, (region,))
    recomputation = Recomputation.of(layout, region)

    def time_s(saved: frozenset[str]) -> float:
        return sum(graph.node_by_name[name].time_s for name in recomputation.runs(saved))

    def kept_bytes(saved: frozenset[str]) -> int:
        kept = (name for names in recomputation.kept(saved).values() for name in names)
        roots = {graph.root(name) for name in kept if 0 not in layout.homes(name)}
        return sum(graph.tensor_by_name[root].size_bytes for root in roots)

    saved: frozenset[str] = frozenset()
    prices: dict[str, float] = {}
    price = 0.0
    while True:
        left_s, before_bytes = time_s(saved), kept_bytes(saved)
        best: tuple[float, str, frozenset[str]] | None = None
        for name in recomputation.runs(saved):
            more = may_save(dataclasses.replace(region, saved=saved | {name}))
            spared_s = left_s - time_s(more)
            if name in more and spared_s > 0:
                each = max(0, kept_bytes(more) - before_bytes) / spared_s
                if best is None or (each, name) < best[:2]:
                    best = each, name, more
        if best is None:
            return prices
        price = max(price, best[0])  # it is of no use before those that it was chosen after
        prices[best[1]] = price
        saved = best[2]


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
