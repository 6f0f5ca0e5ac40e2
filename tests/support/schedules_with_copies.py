"""Add copies to schedules: storages leave the device between two uses. Plan with copies."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphs.graph import Graph
from solver.methods.auto import with_copies
from solver.schedule import simulate
from solver.schedule.host_and_disk import Link, Place, Places
from solver.schedule.ops import (
    Compute,
    Delete,
    Drop,
    Fetch,
    Free,
    Load,
    Op,
    Schedule,
    Spill,
    Store,
)


@dataclass(frozen=True)
class Gap:
    """No op between the positions `start` and `stop` uses a storage.

    live: tensors on the storage that are live.
    made: tensors that a fetch of the storage brings back.
    overwritten: whether the op at `stop` overwrites the storage.
    """

    storage: str
    start: int
    stop: int
    live: tuple[str, ...]
    made: tuple[str, ...]
    overwritten: bool


def unused_gaps(graph: Graph, schedule: Schedule) -> Iterator[Gap]:
    """The gaps of all storages that may be copied, in the order of their ends."""
    stays = never_stored(graph)
    live: set[str] = set()
    made: set[str] = set()
    gone: set[str] = set()
    touched: dict[str, int] = {}
    for position, op in enumerate(schedule.ops):
        node = graph.node_by_name[op.node] if isinstance(op, Compute) else None
        names = (op.tensor,) if isinstance(op, Free) else ()
        if node is not None:
            names = (*graph.needs[node.name], *node.outputs)
        overwrites = node.overwrites if node is not None else None
        for root in dict.fromkeys(map(graph.root, names)):
            on_it = [n for n in (root, *graph.views.get(root, ())) if n in graph.producer]
            may_leave = root in on_it and root not in stays
            if may_leave and live.intersection(on_it) and touched[root] < position - 1:
                yield Gap(
                    storage=root,
                    start=touched[root],
                    stop=position,
                    live=tuple(n for n in on_it if n in live),
                    made=tuple(n for n in on_it if n in made - gone),
                    overwritten=overwrites is not None and graph.root(overwrites) == root,
                )
            touched[root] = position
        if node is None:
            live.difference_update(names)
            continue
        live.update(node.outputs)
        made.update(node.outputs)
        if overwrites is not None:
            gone |= {n for n in graph.producer if graph.root(n) == graph.root(overwrites)}
            gone -= set(node.outputs)


def with_ops_before(schedule: Schedule, inserted: dict[int, list[Op]]) -> Schedule:
    """The schedule with further ops. inserted: position -> ops to put before the op there."""
    ops: list[Op] = []
    for position, op in enumerate(schedule.ops):
        ops += [*inserted.get(position, ()), op]
    ops += inserted.get(len(schedule.ops), ())
    return Schedule(ops=tuple(ops), graph_id=schedule.graph_id)


def copy_away(graph: Graph, schedule: Schedule, chosen: Iterable[Gap]) -> Schedule:
    """Copy each storage to the host at the start of its gap and back right before the gap's end."""
    inserted: dict[int, list[Op]] = defaultdict(list)
    for gap in chosen:
        inserted[gap.start + 1] += [Store(gap.storage), *map(Free, gap.live)]
        inserted[gap.stop] += [Fetch(gap.storage), Drop(gap.storage)]
        inserted[gap.stop] += [Free(name) for name in gap.made if name not in gap.live]
    return with_ops_before(schedule, inserted)


def never_stored(graph: Graph) -> frozenset[str]:
    """The storages of the step's outputs, and those that cannot be copied."""
    outputs = map(graph.root, graph.outputs)
    return frozenset(outputs).union(t.name for t in graph.tensors if not t.copyable)


def random_copies(graph: Graph, schedule: Schedule, rng: random.Random) -> Schedule:
    """Copy storages to the host in random gaps, sometimes on to the disk.

    Mostly legal. Illegal if a copy is still there when its storage is overwritten.
    """
    share = rng.choice((0.2, 0.5, 1.0))
    inserted: dict[int, list[Op]] = defaultdict(list)
    on_host: set[str] = set()
    on_disk: set[str] = set()
    for gap in unused_gaps(graph, schedule):
        if rng.random() > share:
            continue
        s = gap.storage
        ops: list[Op] = [] if s in on_host else [Store(s)]
        on_host.add(s)
        left: list[Op] = [Free(name) for name in gap.live]
        if rng.random() < 0.3:
            by_disk: list[Op] = [Drop(s), Load(s)]
            if s not in on_disk:
                by_disk.insert(0, Spill(s))
            on_disk.add(s)
            if gap.overwritten or rng.random() < 0.5:
                by_disk.append(Delete(s))
                on_disk.discard(s)
            left = _interleaved(left, by_disk, rng)
        ops += [*left, Fetch(s), *(Free(name) for name in gap.made if name not in gap.live)]
        if gap.overwritten or rng.random() < 0.5:
            ops.append(Drop(s))
            on_host.discard(s)
        places = sorted(rng.randint(gap.start + 1, gap.stop) for _ in ops)
        for place, op in zip(places, ops, strict=True):
            inserted[place].append(op)
    return with_ops_before(schedule, inserted)


def _interleaved(first: list[Op], second: list[Op], rng: random.Random) -> list[Op]:
    which = [0] * len(first) + [1] * len(second)
    rng.shuffle(which)
    sources = iter(first), iter(second)
    return [next(sources[i]) for i in which]


def random_places(rng: random.Random) -> Places:
    """A host and a disk with random rates and latencies that give times exact in binary."""

    def place() -> Place:
        rates = rng.choices((0.25, 0.5, 1.0, 2.0, 8.0), k=2)
        return Place(10**6, Link(*rates, latency_s=rng.choice((0.0, 0.0, 0.5, 2.0))))

    return Places(host=place(), disk=place())


def planned_step_s(graph: Graph, *, budget_bytes: int, places: Places) -> float:
    """Seconds of the step under the plan that `recompute_and_copy` proposes.

    Asserts that the plan is within the budget and not below the proposal's bound.
    """
    proposal = with_copies.recompute_and_copy(
        graph, budget_bytes=budget_bytes, time_limit_s=6000, places=places
    )
    simulation = simulate(graph, proposal.schedule, places=places)
    assert simulation.peak_bytes <= budget_bytes
    assert proposal.lower_bound_s <= simulation.time_s + 1e-12
    return simulation.time_s
