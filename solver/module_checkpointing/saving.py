"""Choose which results checkpointed regions save, within a budget.

If a region saves a result, it need not recompute the operators that contribute to nothing else
(`Recomputation`). For each region, results are ranked greedily by price: the next one is that with
the fewest bytes per second of recomputation that it avoids, given those ranked before it. The lists
of all regions are merged by price. As many results from the start of the list as fit are saved,
then further ones that still fit. Whether they fit is decided by simulating the step.

A region that no longer drops anything is left out.

Not optimal: the peak is not the sum of what is saved.

Cost: n^2 evaluations of what a region of n operators recomputes; then about log2(operators)
simulations, and up to N_MORE * log2(operators) more.
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
"""How many operators that do not fit are skipped, to try those after them."""

MaySave: TypeAlias = Callable[[CheckpointRegion], frozenset[str]]
"""A region with the operators to save -> those of them whose results the framework can save."""


@dataclass(frozen=True)
class Saving:
    """What regions can save, in order of price.

    regions: disjoint, without regions inside.
    needed: for each region, the nodes that make the tensors which it drops and its backward needs.
    order: nodes whose results can be saved, those with the fewest bytes per avoided second first.
        Of equal ones, those of later regions come first, since the backward pass reaches them
        earlier.
    may_save: what the framework can save.
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
        """Rank the results of these regions.

        regions: each with the tensors that it drops (`dropped_by`).
        prices: nodes of a region -> its `prices_of`, as far as known; missing ones are added.
        """
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
        """The regions, each saving those of the named nodes that it can."""
        for region, needed in zip(self.regions, self.needed, strict=True):
            chosen = dataclasses.replace(region, saved=names.intersection(region.nodes))
            saved = self.may_save(chosen) if chosen.saved else frozenset()
            if not needed <= saved:
                yield dataclasses.replace(region, saved=saved)


def prices_of(graph: Graph, region: CheckpointRegion, may_save: MaySave) -> dict[str, float]:
    """Node -> bytes per avoided second of saving its result, in the order of the greedy ranking."""
    layout = RegionLayout(graph, (region,))
    recomputation = Recomputation.of(layout, region)

    def time_s(saved: frozenset[str]) -> float:
        return sum(graph.node_by_name[name].time_s for name in recomputation.nodes_to_run(saved))

    def kept_bytes(saved: frozenset[str]) -> int:
        kept = (name for names in recomputation.kept_outputs(saved).values() for name in names)
        roots = {graph.root(name) for name in kept if 0 not in layout.saved_at_depths(name)}
        return sum(graph.tensor_by_name[root].size_bytes for root in roots)

    saved: frozenset[str] = frozenset()
    prices: dict[str, float] = {}
    price = 0.0
    while True:
        left_s, before_bytes = time_s(saved), kept_bytes(saved)
        best: tuple[float, str, frozenset[str]] | None = None
        for name in recomputation.nodes_to_run(saved):
            with_more = may_save(dataclasses.replace(region, saved=saved | {name}))
            avoided_s = left_s - time_s(with_more)
            if name in with_more and avoided_s > 0:
                each = max(0, kept_bytes(with_more) - before_bytes) / avoided_s
                if best is None or (each, name) < best[:2]:
                    best = each, name, with_more
        if best is None:
            return prices
        # never cheaper than the one before: the price holds only if that one is saved too
        price = max(price, best[0])
        prices[best[1]] = price
        saved = best[2]


def save_what_fits(
    saving: Saving, excess_bytes: Callable[[Sequence[CheckpointRegion]], int]
) -> None:
    """Try regions that save as many of the ranked results as fit.

    excess_bytes: simulates a choice of regions and returns by how much it is above the budget; the
        caller remembers the best choice in it.
    """

    def fits(names: Sequence[str]) -> bool:
        return excess_bytes(list(saving.with_saved(frozenset(names)))) <= 0

    saved: list[str] = []
    untried = list(saving.order)
    if not fits(saved):
        return
    for _ in range(1 + N_MORE):
        low, high = 0, len(untried)  # `low` more fit; more than `high` do not
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits([*saved, *untried[:middle]]) else (low, middle - 1)
        saved += untried[:low]
        untried = untried[low + 1 :]
        if not untried:
            break
