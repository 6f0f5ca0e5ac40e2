"""The best plan that checkpointing by module can carry out, near a schedule of single operators.

What people can switch on without changing their step is to checkpoint modules, whole or all but
some operators (`solver.module_checkpointing.regions` says what that does). Here modules and
operators are chosen:

- *As the schedule says.* A block in which it drops nothing is left alone; one in which it drops
  everything is checkpointed whole; else the operators whose results it keeps are saved. The same
  with the blocks' parts in place of the blocks, one and two levels down: then fewer operators run
  again for nothing, but the parts' arguments stay.
- *From smaller budgets.* Running a block again all at once takes more than running operators in
  time, so the result may be above the budget; then the schedule of a budget smaller by the excess
  is taken.
- *The first n blocks whole*, where that is not enough, with the least n that fits (bisection): the
  last blocks' backward comes first, so theirs is the memory that is free again soonest.
- *Nested*: blocks inside checkpointed modules around them, and their parts inside blocks.

All are judged by `solver.simulate`; the fastest that fits is taken. Optimal for nothing.

Cost: some dozen schedules replayed and judged, and up to N_SMALLER_BUDGETS solves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graphs.graph import Graph, is_under
from solver.module_checkpointing.regions import Region, RegionError, dropped_by, nodes_of
from solver.module_checkpointing.to_schedule import RegionsSchedule, schedule_from_regions
from solver.schedule import Schedule, Simulation, Solution, held_at_turn, simulate
from solver.solving import attempt

N_SMALLER_BUDGETS = 4
RESOLVE_TIME_LIMIT_S = 10.0
DEPTHS = (0, 1, 2)


@dataclass(frozen=True)
class ModuleTree:
    """Which modules can be checkpointed, as paths.

    blocks: disjoint, in the order in which they run. parts: of each of them and of their parts,
    the nearest modules inside that are called. around: called modules that hold whole blocks, the
    model itself left out, and disjoint.
    """

    blocks: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    around: tuple[str, ...] = ()


MaySave = Callable[[Region], frozenset[str]]
"""Of the operators that a region would save, those whose results the framework can save."""


@dataclass(frozen=True)
class ModulePlan:
    """regions: what to checkpoint, with `n_reruns` by path. schedule, trace: all of the step.

    peak_bytes: the trace's, and what the framework holds beside for each checkpointed call.
    refused: path -> why the module cannot be checkpointed.
    """

    regions: tuple[Region, ...]
    n_reruns: Mapping[str, int]
    schedule: Schedule
    simulation: Simulation
    peak_bytes: int
    refused: Mapping[str, str]


class NoModulesFitError(ValueError):
    """No choice of modules fits; `least` is the one with the smallest peak that was found."""

    def __init__(self, least: ModulePlan) -> None:
        super().__init__(f"checkpointing by module takes at least {least.peak_bytes} bytes")
        self.least = least


def by_module(
    solution: Solution, tree: ModuleTree, *, may_save: MaySave, beside_bytes: int
) -> ModulePlan:
    """The fastest plan by module that was found within the solution's budget.

    beside_bytes: what the framework holds for each checkpointed call. Raises NoModulesFitError;
    ValueError for a solution without a schedule.
    """
    if solution.schedule is None:
        raise ValueError(f"the solution has no schedule: its status is {solution.status}")
    graph = solution.graph
    budget_bytes = solution.request.available_bytes
    search = _Search(graph, budget_bytes=budget_bytes, beside_bytes=beside_bytes)
    choice = _Choice(graph, tree, may_save)
    search.judge(())  # without any
    schedule: Schedule | None = solution.schedule
    for _ in range(1 + N_SMALLER_BUDGETS):
        if schedule is None:
            break
        kept = held_at_turn(graph, schedule)
        excess_bytes = min(
            search.first_blocks_whole(choice, choice.regions(kept, depth=depth)) for depth in DEPTHS
        )
        if excess_bytes <= 0:
            break
        budget_bytes -= excess_bytes
        schedule = _schedule_within(solution, budget_bytes)
    search.first_blocks_whole(choice, {})
    if search.best is None:
        for regions in choice.nested():
            search.judge(regions)
    refused = dict(choice.refused)
    if search.best is None:
        assert search.least is not None  # at least the plan without any region was judged
        raise NoModulesFitError(dataclasses.replace(search.least, refused=refused))
    return dataclasses.replace(search.best, refused=refused)


def _schedule_within(solution: Solution, budget_bytes: int) -> Schedule | None:
    """Planned anew by the same method, in less time; None: nothing was found."""
    if budget_bytes <= 0:
        return None
    request = dataclasses.replace(
        solution.request,
        budget_bytes=budget_bytes,
        reserve_bytes=0,
        time_limit_s=min(RESOLVE_TIME_LIMIT_S, solution.request.time_limit_s),
    )
    return attempt(solution.graph, request).schedule


@dataclass
class _Choice:
    """Regions for what a schedule keeps."""

    graph: Graph
    tree: ModuleTree
    may_save: MaySave
    refused: dict[str, str] = field(default_factory=dict)
    _whole: dict[str, tuple[Region, tuple[str, ...]] | None] = field(default_factory=dict)

    def whole(self, path: str) -> Region | None:
        """The module checkpointed whole; None where it cannot be, or has nothing to drop."""
        known = self._known(path)
        return known[0] if known and known[1] else None

    def _known(self, path: str) -> tuple[Region, tuple[str, ...]] | None:
        if path not in self._whole:
            self._whole[path] = None
            try:
                region = Region(path, nodes_of(self.graph, path))
                self._whole[path] = region, dropped_by(self.graph, region)
            except RegionError as error:
                self.refused[path] = str(error)
        return self._whole[path]

    def regions(self, kept: frozenset[str], *, depth: int) -> dict[str, tuple[Region, ...]]:
        """By block, what to checkpoint of it so that these storages are kept."""
        return {block: tuple(self._as_kept(block, kept, depth=depth)) for block in self.tree.blocks}

    def _as_kept(self, path: str, kept: frozenset[str], *, depth: int) -> Iterator[Region]:
        if depth:
            for part in self.tree.parts.get(path, ()):
                yield from self._as_kept(part, kept, depth=depth - 1)
            return
        known = self._known(path)
        if known is None:
            return
        region, dropped = known
        missing = [name for name in dropped if self.graph.root(name) not in kept]
        if not missing:
            return
        makers_of_missing = {self.graph.producer[name].name for name in missing}
        makers = {self.graph.producer[name].name for name in dropped}
        saved = frozenset(makers - makers_of_missing)
        saved = self.may_save(dataclasses.replace(region, saved=saved))
        yield dataclasses.replace(region, saved=saved)

    def nested(self) -> Iterator[tuple[Region, ...]]:
        """Blocks with parts inside; modules around blocks: whole, with blocks inside, with both.

        Those blocks that are in no such module stay as they are, whole.
        """
        blocks = [region for path in self.tree.blocks if (region := self.whole(path))]
        with_parts = [self._with_parts(block) for block in blocks]
        yield tuple(with_parts)
        if self.tree.around:
            for inner in ([], blocks, with_parts):
                yield tuple(self._around(inner, blocks))

    def _with_parts(self, block: Region) -> Region:
        parts = [self.whole(path) for path in self.tree.parts.get(block.path, ())]
        return dataclasses.replace(block, inner=tuple(part for part in parts if part))

    def _around(self, inner: Sequence[Region], blocks: Sequence[Region]) -> Iterator[Region]:
        wholes = [whole for path in self.tree.around if (whole := self.whole(path))]
        for whole in wholes:
            inside = tuple(each for each in inner if is_under(each.path, whole.path))
            yield dataclasses.replace(whole, inner=inside)
        yield from (b for b in blocks if not any(is_under(b.path, w.path) for w in wholes))


class _Search:
    """Of all plans judged so far: the fastest that fits, and the smallest peak."""

    def __init__(self, graph: Graph, *, budget_bytes: int, beside_bytes: int) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._beside_bytes = beside_bytes
        self.best: ModulePlan | None = None
        self.least: ModulePlan | None = None

    def judge(self, regions: Sequence[Region]) -> int:
        """By how many bytes the plan is above the budget (0 or less: it fits)."""
        replayed: RegionsSchedule = schedule_from_regions(self._graph, regions)
        simulation = simulate(self._graph, replayed.schedule)
        n_regions = sum(1 for region in regions for _ in region.flat())
        # one more while a region runs again: the state that it interrupts
        beside_bytes = self._beside_bytes * (n_regions + 1) if n_regions else 0
        peak_bytes = simulation.peak_bytes + beside_bytes
        plan = ModulePlan(
            regions=tuple(regions),
            n_reruns=replayed.n_reruns,
            schedule=replayed.schedule,
            simulation=simulation,
            peak_bytes=peak_bytes,
            refused={},
        )
        if self.least is None or peak_bytes < self.least.peak_bytes:
            self.least = plan
        if peak_bytes <= self._budget_bytes and (
            self.best is None
            or (simulation.time_s, peak_bytes) < (self.best.simulation.time_s, self.best.peak_bytes)
        ):
            self.best = plan
        return peak_bytes - self._budget_bytes

    def first_blocks_whole(self, choice: _Choice, regions: Mapping[str, tuple[Region, ...]]) -> int:
        """Judge these regions, then with the first n blocks whole for the least n that fits.

        Returns by how much the regions by themselves are above the budget.
        """
        blocks = choice.tree.blocks

        def judge(n_whole: int) -> int:
            chosen: list[Region] = []
            for position, block in enumerate(blocks):
                whole = choice.whole(block) if position < n_whole else None
                chosen += [whole] if whole else regions.get(block, ())
            return self.judge(chosen)

        excess_bytes = judge(0)
        if excess_bytes > 0 and blocks:
            overflows, fits = 0, len(blocks) + 1
            n_whole = len(blocks)
            while fits - overflows > 1:
                if judge(n_whole) > 0:
                    overflows = n_whole
                else:
                    fits = n_whole
                n_whole = (overflows + fits) // 2
        return excess_bytes
