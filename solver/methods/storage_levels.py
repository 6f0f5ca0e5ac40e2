"""Published methods for chains of equal steps with snapshots on the device, the host and the disk.

The graph is split into a chain of blocks as for `revolve`; its snapshots are the tensors between
two blocks. `solver.chain` reverses the chain with snapshots on several levels. The number of
snapshots on the device is the largest that fits, found by bisection; some other numbers are tried
too. A tensor that is only on a slow level whenever a block is reversed is copied there, and back in
time for its use (`auto.place_within_layout`).

- `hrevolve` (Herrmann, Pallez 2020): device, host and disk.
- `disk_revolve` (Aupy, Herrmann, Hovland, Robert 2016), `periodic_disk_revolve` (Aupy, Herrmann
  2017): the device and the disk if there is one, otherwise the host, treated as unlimited.
- `multistage` (Stumm, Walther 2009): device, host and disk; the fewest forward steps for all
  snapshots together.

Optimal for steps of equal time and snapshots of equal bytes, if nothing is computed while a
snapshot is copied. On a graph that is pessimistic, since copies overlap with computation, also in
the simulator. Like `revolve` they fall short where steps are unequal and where there is memory for
more than inputs; and they do not model a busy link.

Cost: some dozen reversals of at most MAX_BLOCKS blocks, each turned into a schedule and simulated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.chain import (
    Action,
    Blocks,
    Level,
    chain_to_schedule,
    disk_revolve,
    hrevolve,
    multistage,
    periodic_disk_revolve,
    reversal_ops,
    split_into_blocks,
)
from solver.methods.auto import Gap, find_gaps, place_within_layout
from solver.methods.best_so_far import BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import Places, Schedule, baseline

MAX_BLOCKS = 128
N_TRANSIT_SNAPSHOTS = 2
"""If there is a disk, the host keeps room for so many snapshots on their way to or from it."""

Actions = tuple[Action, ...]
Reverse = Callable[..., Actions | None]
"""From `n_steps` and `levels` to the actions; None: not enough snapshots."""
KnownResults = dict[tuple[Actions, tuple[bool, ...]], bool]
"""Whether schedules fit, by their actions and by which slow levels are on disk."""


@dataclass(frozen=True)
class SlowLevel:
    """A slow level of the chain, and whether it is the disk or the host."""

    level: Level
    on_disk: bool = False


def plan_on_levels(
    reverse: Reverse,
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    seed: int,
    places: Places | None = None,
    known: KnownResults | None = None,
    two_levels: bool = False,
) -> Proposal:
    """Find the best of the reversals. Without places all snapshots are on the device.

    No randomness.

    known: results of methods tried before within this budget; these schedules are not tried again.
    two_levels: use only the device and the slowest level.
    """
    tried = {} if known is None else known
    with BestSoFar(
        graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, places=places
    ) as search:
        if search.fits(baseline(graph)):
            return search.proposal()
        blocks = split_into_blocks(graph, max_blocks=MAX_BLOCKS)
        slow_levels = _slow_levels(graph, blocks, places or Places())
        slow_levels = slow_levels[-1:] if two_levels else slow_levels
        on_disk = tuple(each.on_disk for each in slow_levels)

        @cache
        def fits(n_snapshots: int) -> bool:
            levels = (Level(n_snapshots), *(each.level for each in slow_levels))
            actions = reverse(n_steps=blocks.n_blocks, levels=levels)
            if actions is None:  # more snapshots may be enough
                return True
            if (actions, on_disk) not in tried:
                schedule = _make_schedule(search, blocks, actions, slow_levels, places)
                tried[actions, on_disk] = search.fits(schedule)
            return tried[actions, on_disk]

        if blocks.n_blocks:
            search.bisect(fits, 0, blocks.n_blocks + 1)
        n_snapshots = 0
        while n_snapshots < blocks.n_blocks:  # missed by bisection if slow levels are small
            fits(n_snapshots)
            n_snapshots += 1 + n_snapshots // 3
    return search.proposal()


METHODS_ON_LEVELS: Mapping[str, Callable[..., Proposal]] = {
    "disk_revolve": partial(plan_on_levels, disk_revolve, two_levels=True),
    "periodic_disk_revolve": partial(plan_on_levels, periodic_disk_revolve, two_levels=True),
    "hrevolve": partial(plan_on_levels, hrevolve),
    "multistage": partial(plan_on_levels, multistage),
}


def _slow_levels(graph: Graph, blocks: Blocks, places: Places) -> list[SlowLevel]:
    """Host and disk as levels for the largest snapshot, with costs in average forward steps."""
    snapshots = blocks.crossing_without_companions
    sizes = (sum(graph.tensor_by_name[name].size_bytes for name in names) for names in snapshots)
    size_bytes = max(sizes, default=0)
    forward_s = sum(node.time_s for node in graph.forward_nodes)
    step_s = forward_s / max(1, blocks.n_blocks) or 1.0
    if places.host is None or not size_bytes:
        return []
    host, disk, n_steps = places.host, places.disk, blocks.n_blocks
    n_on_host = host.capacity_bytes // size_bytes - (0 if disk is None else N_TRANSIT_SNAPSHOTS)
    out_s, in_s = host.link.out_s(size_bytes), host.link.in_s(size_bytes)
    levels = [SlowLevel(Level(max(0, min(n_on_host, n_steps)), out_s / step_s, in_s / step_s))]
    if disk is not None:
        out_s, in_s = out_s + disk.link.out_s(size_bytes), in_s + disk.link.in_s(size_bytes)
        n_on_disk = min(disk.capacity_bytes // size_bytes, n_steps)
        levels.append(SlowLevel(Level(n_on_disk, out_s / step_s, in_s / step_s), on_disk=True))
    return levels


def _make_schedule(
    search: BestSoFar,
    blocks: Blocks,
    actions: Actions,
    slow_levels: Sequence[SlowLevel],
    places: Places | None,
) -> Schedule:
    """The actions as a schedule of the graph, with copies to slow levels. Raises OutOfTimeError."""
    graph = search.graph
    recompute_only = chain_to_schedule(
        graph, blocks, reversal_ops(blocks.n_blocks, actions), deadline=search.deadline
    )
    if places is None or not slow_levels:
        return recompute_only
    folded = StorageGraph.of(graph)
    gaps = list(_gaps_on_slow_levels(folded, recompute_only.order, blocks, actions))
    on_disk = frozenset(gap.unit for gap, level in gaps if slow_levels[level - 1].on_disk)
    size_bytes = folded.unit_bytes
    return place_within_layout(
        folded,
        recompute_only.order,
        [gap for gap, _ in gaps],
        budget_bytes=search.budget_bytes,
        places=places,
        to_disk=lambda within: frozenset(u for u in on_disk if size_bytes[u] <= within.disk_bytes),
    ).schedule


def _gaps_on_slow_levels(
    folded: StorageGraph, order: Sequence[str], blocks: Blocks, actions: Actions
) -> Iterator[tuple[Gap, int]]:
    """Yield the gaps to spend on a slow level, and that level.

    In such a gap the tensor is on slow levels only, at each reversal of a block.
    """
    position = {name: i for i, name in enumerate(order)}  # later nodes run only once
    # (position where a block is reversed, cut -> the fastest level with its snapshot)
    anchors: list[tuple[int, dict[int, int]]] = []
    levels_of_cut: dict[int, list[int]] = {}
    for kind, start, level in actions:
        if kind == "store":
            levels_of_cut.setdefault(start, []).append(level)
        elif kind == "drop":
            levels_of_cut[start].remove(level)
        elif kind == "reverse" and blocks.backward[start - 1]:
            fastest = {cut: min(levels) for cut, levels in levels_of_cut.items() if levels}
            anchors.append((position[blocks.backward[start - 1][0]], fastest))
    cuts_of: dict[str, list[int]] = {}
    for cut, names in enumerate(blocks.crossing):
        for name in names:
            if name not in blocks.companions:
                cuts_of.setdefault(name, []).append(cut)
    places_of_anchors = [position_of_anchor for position_of_anchor, _ in anchors]
    for gap in find_gaps(folded, order):
        first = bisect_left(places_of_anchors, gap.first)
        anchors_inside = anchors[first : bisect_left(places_of_anchors, gap.last)]
        cuts = cuts_of.get(folded.unit_names[gap.unit], [])
        levels = [
            min((fastest[cut] for cut in cuts if cut in fastest), default=0)
            for _, fastest in anchors_inside
        ]
        if levels and min(levels) > 0:
            yield gap, max(levels)
