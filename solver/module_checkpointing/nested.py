"""Nested checkpoints around neighbours of a row, and the best of them within a budget.

In a row each step reads what the one before it made and nothing else, as the modules of an
nn.Sequential do. Then any neighbours can run again together, and inside of these again others:

- `solver.chain.rotor` gives the fastest persistent schedule of a chain. Where it keeps x_{s-1},
  runs forward to x_{k-1}, and comes back to s .. k-1 after all behind it is done, the steps s ..
  k-1 are one checkpoint, and what it does when it comes back says which checkpoints are inside. So
  every persistent schedule is a tree of checkpoints, and frameworks that nest can run it.
- A chain knows less than a graph (tensors that several steps put by, what runs beside the row). So
  each answer is carried over to the graph (`solver.module_checkpointing.regions`) and judged by
  `solver.simulate`; the chain's budget is found by bisection, and the fastest that fits is taken.

Optimal for: nothing; for the chain, what `solver.chain.rotor` says. Cost: N_BUDGETS solves of the
chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from solver.chain import (
    Backward,
    Chain,
    ChainOp,
    ForwardKeepingAll,
    ForwardKeepingOutput,
    keeping_everything,
    simulate_chain,
    solve_chain,
)
from solver.module_checkpointing.regions import Region
from solver.module_checkpointing.to_schedule import schedule_from_regions
from solver.schedule import Schedule, Simulation, simulate

N_BUDGETS = 12
N_SLOTS = 200
MAX_DEPTH = 16
"""Frameworks run nested checkpoints by recursion, some Python frames deep for each."""


@dataclass(frozen=True)
class Segment:
    """Neighbours that run again together: positions in the row, the last one included, and the
    segments inside, disjoint and in order."""

    first: int
    last: int
    inner: tuple[Segment, ...] = ()

    def flat(self) -> Iterator[Segment]:
        """This segment and all inside."""
        yield self
        for segment in self.inner:
            yield from segment.flat()

    @property
    def depth(self) -> int:
        """How many are nested, 1 for a segment with none inside."""
        return 1 + max((segment.depth for segment in self.inner), default=0)


@dataclass(frozen=True)
class Row:
    """Steps that run one after another. nodes: of each of them, its forward nodes in the graph.
    chain: the same as a chain, for proposals. modules: which modules of nodes each step is."""

    nodes: tuple[tuple[str, ...], ...]
    modules: tuple[tuple[str, ...], ...]
    chain: Chain


@dataclass(frozen=True)
class SegmentPlan:
    """schedule, trace: all of the step. n_reruns: how often each segment runs again, in the order
    of `flat` over all."""

    segments: tuple[Segment, ...]
    n_reruns: tuple[int, ...]
    schedule: Schedule
    simulation: Simulation


def nested_segments(ops: Sequence[ChainOp], n_blocks: int) -> tuple[Segment, ...]:
    """The checkpoints that carry out a persistent schedule of `solver.chain.rotor`, around blocks 0
    ..
    n_blocks - 1 (the chain counts them from 1)."""
    return _Parser(ops).segments(1, n_blocks + 1)


class _Parser:
    """Reads operations in the order of the recursion that wrote them."""

    def __init__(self, ops: Sequence[ChainOp]) -> None:
        self._ops = ops
        self._at = 0

    def segments(self, s: int, t: int) -> tuple[Segment, ...]:
        """Of blocks s .. t, reading all their operations."""
        found: list[tuple[int, int]] = []
        saving: list[int] = []
        todo: list[tuple[int, int] | None] = []  # what is left, last first; None: a backward
        while s <= t:
            op = self._ops[self._at]
            if isinstance(op, Backward):  # the loss, which has no forward of its own
                break
            self._at += 1
            if isinstance(op, ForwardKeepingAll):
                saving.append(s)
                todo.append(None)
                s += 1
            else:
                k = s + 1
                while self._passes():
                    self._at += 1
                    k += 1
                found.append((s, k - 1))
                todo.append((s, k - 1))
                s = k
        if s <= t:
            self._at += 1
        inner: dict[tuple[int, int], tuple[Segment, ...]] = {}
        for item in reversed(todo):
            if item is None:
                self._at += 1
            else:
                inner[item] = self.segments(*item)
        return tuple(Segment(first - 1, last - 1, inner[first, last]) for first, last in found)

    def _passes(self) -> bool:
        return self._at < len(self._ops) and isinstance(self._ops[self._at], ForwardKeepingOutput)


def judged(graph: Graph, row: Row, segments: Sequence[Segment]) -> SegmentPlan:
    """What the step takes with these checkpoints."""
    paths = _Paths(row)
    regions = [paths.region(segment, "") for segment in segments]
    paths.add_rest(segments)
    nodes = tuple(
        dataclasses.replace(node, module=paths.of.get(node.module, "")) for node in graph.nodes
    )
    # the regions' paths must hold those of their nodes: only the replay sees these names
    replayed = schedule_from_regions(
        dataclasses.replace(graph, nodes=nodes), regions, locals_held=False
    )
    n_reruns = tuple(replayed.n_reruns[r.path] for region in regions for r in region.flat())
    return SegmentPlan(
        segments=tuple(segments),
        n_reruns=n_reruns,
        schedule=replayed.schedule,
        simulation=simulate(graph, replayed.schedule),
    )


class _Paths:
    """Paths of modules as they would be if each segment were a module around its steps."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.of: dict[str, str] = {}
        self._n_regions = 0

    def region(self, segment: Segment, around: str) -> Region:
        self._n_regions += 1
        path = f"{around}segment{self._n_regions}"
        inner = tuple(self.region(each, f"{path}.") for each in segment.inner)
        for position in range(segment.first, segment.last + 1):
            for module in self._row.modules[position]:
                self.of.setdefault(module, f"{path}.step{len(self.of)}")
        nodes = self._row.nodes[segment.first : segment.last + 1]
        return Region(path, tuple(name for each in nodes for name in each), inner=inner)

    def add_rest(self, segments: Sequence[Segment]) -> None:
        inside = {p for each in segments for p in range(each.first, each.last + 1)}
        for position, modules in enumerate(self._row.modules):
            if position not in inside:
                self.of |= {module: f"step{len(self.of)}.{n}" for n, module in enumerate(modules)}


Judge = Callable[[SegmentPlan], int]
"""By how many bytes a plan is above the budget (0 or less: it fits)."""


def best_segments(graph: Graph, row: Row, *, excess: Judge) -> tuple[SegmentPlan | None, int]:
    """The fastest plan found that fits (None: none does), and the smallest peak found, in bytes."""
    chain = row.chain
    _, most_bytes = simulate_chain(chain, keeping_everything(chain))
    best = judged(graph, row, ())
    least_bytes = best.simulation.peak_bytes
    if excess(best) <= 0:
        return best, least_bytes
    found: SegmentPlan | None = None
    known: dict[tuple[Segment, ...], SegmentPlan] = {}
    low, high = 0, most_bytes
    for _ in range(N_BUDGETS):
        budget_bytes = (low + high) // 2
        answer = solve_chain(chain, budget_bytes=budget_bytes, n_slots=N_SLOTS)
        if answer is None:
            low = budget_bytes
            continue
        segments = nested_segments(answer.ops, chain.n_blocks)
        if max((segment.depth for segment in segments), default=0) > MAX_DEPTH:
            low = budget_bytes
            continue
        if segments not in known:
            known[segments] = judged(graph, row, segments)
        plan = known[segments]
        least_bytes = min(least_bytes, plan.simulation.peak_bytes)
        if excess(plan) > 0:
            high = budget_bytes
            continue
        low = budget_bytes
        if found is None or _rank(plan) < _rank(found):
            found = plan
    return found, least_bytes


def _rank(plan: SegmentPlan) -> tuple[float, int]:
    return plan.simulation.time_s, plan.simulation.peak_bytes


def described(segments: Sequence[Segment], names: Sequence[str]) -> Iterator[str]:
    """Lines that say which neighbours are checkpointed together, those inside further right."""
    for segment in segments:
        first, last = names[segment.first], names[segment.last]
        n_steps = segment.last - segment.first + 1
        yield first if n_steps == 1 else f"{first} .. {last} ({n_steps} together)"
        yield from (f"  {line}" for line in described(segment.inner, names))


def shifted(segments: Sequence[Segment], starts: Mapping[int, int]) -> tuple[Segment, ...]:
    """In the positions of the members when step p of the row begins at member starts[p]."""
    return tuple(
        Segment(starts[s.first], starts[s.last + 1] - 1, shifted(s.inner, starts)) for s in segments
    )
