"""Search for the best plan that checkpoints modules, starting from a schedule of single operators.

Without changing their training step, users can checkpoint modules, either whole or except for some
operators (`solver.module_checkpointing.regions` models this). The search tries several ways to
choose the modules and operators:

- *As in the schedule.* A block in which the schedule drops nothing is left alone; one in which it
  drops everything is checkpointed whole; otherwise the operators whose results it keeps are saved.
  The same with submodules in place of blocks, one and two levels down: then fewer operators are
  recomputed needlessly, but the arguments of the submodules stay.
- *From smaller budgets.* Recomputing a whole block takes more memory than recomputing operators
  just in time, so the result may exceed the budget. Then the schedule for a budget that is smaller
  by the excess is tried.
- *The first n blocks whole* if that is not enough, with the least n that fits (by bisection). The
  first blocks are chosen because the last blocks' backward comes first and frees their memory
  soonest.
- *The first n blocks, saving what fits* (`saving`): every block, or every submodule, saves the
  operators that avoid the most seconds of recomputation per byte.
- *Nested*: checkpointed blocks inside checkpointed modules, and submodules inside blocks.

Every choice is simulated, and the fastest that fits is taken. It is not proven to be optimal.

Cost: some hundred simulated schedules, and up to N_SMALLER_BUDGETS quick solves. All work is
limited by counts, so ranks that export the same plan choose the same modules. Only the request's
time limit could end a quick solve early; `shard` therefore compares what the ranks export.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphs.graph import Graph, is_under
from solver.module_checkpointing.region_plan import ExtraBytes, RegionPlan, plan_regions
from solver.module_checkpointing.regions import CheckpointRegion, RegionError, dropped_by, nodes_of
from solver.module_checkpointing.saving import MaySave, Saving, save_what_fits
from solver.schedule import Solution, saved_for_backward
from solver.solving import attempt

N_SMALLER_BUDGETS = 4
"""How many smaller budgets are planned at most."""
DEPTHS = (0, 1, 2)
"""Levels below the blocks whose modules are checkpointed; 0: the blocks themselves."""
N_PREFIXES = 6
"""How many values of n are tried for the first n blocks that save what fits."""


@dataclass(frozen=True)
class ModuleTree:
    """The paths of the modules that can be checkpointed.

    blocks: disjoint modules, in the order in which they run.
    parts: module -> the nearest modules inside it that are called, for blocks and their parts.
    around: disjoint called modules that contain whole blocks, without the model itself.
    """

    blocks: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    around: tuple[str, ...] = ()


class NoModulesFitError(ValueError):
    """No choice of modules was found that fits; `least` is the one with the smallest peak."""

    def __init__(self, least: RegionPlan) -> None:
        super().__init__(f"checkpointing by module takes at least {least.peak_bytes} bytes")
        self.least = least


def by_module(
    solution: Solution, tree: ModuleTree, *, may_save: MaySave, extra_bytes: ExtraBytes | None
) -> RegionPlan:
    """Find the fastest plan by modules within the solution's budget.

    tree: the modules to choose from.
    may_save: which operators of a region the framework can save.
    extra_bytes: as in `plan_regions`.

    Raises NoModulesFitError if no plan is found that fits, and ValueError for a solution without a
    schedule.
    """
    if solution.schedule is None:
        raise ValueError(f"the solution has no schedule: its status is {solution.status}")
    graph = solution.graph
    module_regions = _ModuleRegions(graph, tree, may_save)
    available_bytes = budget_bytes = solution.request.available_bytes
    least = plan_regions(graph, (), extra_bytes=extra_bytes)
    best = least if least.peak_bytes <= available_bytes else None

    def excess_bytes(regions: Sequence[CheckpointRegion]) -> int:
        """Simulate these regions and note the best plans; return the bytes above the budget (0 or
        less: it fits)."""
        nonlocal best, least
        plan = plan_regions(graph, regions, extra_bytes=extra_bytes)
        least = min(least, plan, key=lambda plan: plan.peak_bytes)
        if plan.peak_bytes <= available_bytes:
            best = plan if best is None else min(best, plan, key=lambda plan: plan.rank)
        return plan.peak_bytes - available_bytes

    def fewest_blocks_whole(regions: Mapping[str, Sequence[CheckpointRegion]]) -> int:
        """Try these regions and, if they do not fit, the first n blocks whole for the least n that
        fits, with these regions in the other blocks.

        regions: block -> its regions. Returns their excess with n = 0.
        """

        def excess_with(n_whole: int) -> int:
            chosen: list[CheckpointRegion] = []
            for position, block in enumerate(tree.blocks):
                whole = module_regions.whole_region(block) if position < n_whole else None
                chosen += [whole] if whole else regions.get(block, ())
            return excess_bytes(chosen)

        excess = excess_with(0)
        n_blocks = len(tree.blocks)
        if excess > 0 and tree.blocks and excess_with(n_blocks) <= 0:
            bisect_left(range(n_blocks), True, lo=1, key=lambda n: excess_with(n) <= 0)
        return excess

    schedule = solution.schedule
    for n_solves in range(1 + N_SMALLER_BUDGETS):
        kept = saved_for_backward(graph, schedule)
        excess = min(
            fewest_blocks_whole(
                {b: list(module_regions.regions_keeping(b, kept, depth)) for b in tree.blocks}
            )
            for depth in DEPTHS
        )
        budget_bytes -= excess
        if excess <= 0 or budget_bytes <= 0 or n_solves == N_SMALLER_BUDGETS:
            break
        request = dataclasses.replace(
            solution.request, budget_bytes=budget_bytes, reserve_bytes=0, places=None
        )
        # quick: limited by counts, far from the time limit, so all ranks find the same plan
        smaller = attempt(graph, request, quick=True).schedule
        if smaller is None:
            break
        schedule = smaller
    fewest_blocks_whole({})
    prices: dict[tuple[str, ...], Mapping[str, float]] = {}
    n = min(N_PREFIXES, len(tree.blocks))
    prefixes = [round(len(tree.blocks) * (i + 1) / n) for i in range(n)]  # the last: all blocks
    for depth, n_blocks in itertools.product(DEPTHS, prefixes):
        modules = [
            each for b in tree.blocks[:n_blocks] for each in module_regions.regions_below(b, depth)
        ]
        save_what_fits(Saving.of(graph, modules, may_save, prices), excess_bytes)
    if best is None:
        for regions in module_regions.nested():
            excess_bytes(regions)
    if best is None:
        raise NoModulesFitError(dataclasses.replace(least, refused=module_regions.refused))
    return dataclasses.replace(best, refused=module_regions.refused)


class _ModuleRegions:
    """The regions of modules, built once. refused: path -> why it cannot be checkpointed."""

    def __init__(self, graph: Graph, tree: ModuleTree, may_save: MaySave) -> None:
        self._graph = graph
        self._tree = tree
        self._may_save = may_save
        self._known: dict[str, tuple[CheckpointRegion, tuple[str, ...]] | None] = {}
        self.refused: dict[str, str] = {}

    def whole_region(self, path: str) -> CheckpointRegion | None:
        """The region of a whole module; None if it cannot be checkpointed or drops nothing."""
        return next((region for region, _ in self.regions_below(path, 0)), None)

    def _region(self, path: str) -> tuple[CheckpointRegion, tuple[str, ...]] | None:
        """The region of a module, with the tensors that it drops; None if it cannot be one."""
        if path not in self._known:
            self._known[path] = None
            try:
                region = CheckpointRegion(nodes_of(self._graph, path), modules=(path,))
                self._known[path] = region, dropped_by(self._graph, region)
            except RegionError as error:
                self.refused[path] = str(error)
        return self._known[path]

    def regions_below(
        self, path: str, depth: int
    ) -> Iterator[tuple[CheckpointRegion, tuple[str, ...]]]:
        """The regions `depth` levels below the module that drop something, with what they drop."""
        if depth:
            for part in self._tree.parts.get(path, ()):
                yield from self.regions_below(part, depth - 1)
            return
        region, dropped = self._region(path) or (None, ())
        if region is not None and dropped:
            yield region, dropped

    def regions_keeping(
        self, path: str, kept: frozenset[str], depth: int
    ) -> Iterator[CheckpointRegion]:
        """The regions `depth` levels below a block that keep these storages as far as possible."""
        for region, dropped in self.regions_below(path, depth):
            maker_of = {name: self._graph.producer[name].name for name in dropped}
            missing = {maker_of[name] for name in dropped if self._graph.root(name) not in kept}
            if missing:
                saved = frozenset(maker_of.values()) - missing
                saved = self._may_save(dataclasses.replace(region, saved=saved))
                yield dataclasses.replace(region, saved=saved)

    def nested(self) -> Iterator[tuple[CheckpointRegion, ...]]:
        """The nested choices: blocks with parts inside; then modules around blocks, whole, with
        blocks inside, and with blocks and their parts inside.

        Blocks outside all modules of `around` are checkpointed whole in the latter choices.
        """
        replace = dataclasses.replace
        blocks = self._whole_regions(self._tree.blocks)
        parts = self._tree.parts
        with_parts = [replace(b, inner=self._whole_regions(parts.get(b.path, ()))) for b in blocks]
        yield tuple(with_parts)
        around = self._whole_regions(self._tree.around)
        outside = [b for b in blocks if not any(is_under(b.path, w.path) for w in around)]
        for choice in ((), blocks, with_parts) if self._tree.around else ():
            nested = (
                replace(w, inner=tuple(each for each in choice if is_under(each.path, w.path)))
                for w in around
            )
            yield (*nested, *outside)

    def _whole_regions(self, paths: Sequence[str]) -> tuple[CheckpointRegion, ...]:
        """The regions of those modules that can be checkpointed whole and drop something."""
        return tuple(region for path in paths if (region := self.whole_region(path)))
