"""Nested checkpoints around consecutive steps, and the best of them within a budget.

Each step reads what the one before it made and nothing else, as the modules of an nn.Sequential
do. Then any neighbours can be recomputed together, and inside of these again others:

- `solver.chain.solve_chain` gives the fastest persistent schedule of a chain. Where it keeps
  x_{s-1}, runs forward to x_{k-1}, and comes back to s .. k-1 after everything behind it is done,
  the steps s .. k-1 are one checkpoint, and what it does when it comes back says which checkpoints
  are inside. So every persistent schedule is a tree of checkpoints, and frameworks that nest can
  run it.
- A chain knows less than a graph (tensors that several steps save, what runs beside the steps). So
  each answer is carried over to the graph (`plan_regions`) and simulated; the chain's budget is
  found by bisection, and the fastest plan that fits is taken.

Optimal for: nothing; for the chain, what `solve_chain` says. Cost: N_BUDGETS solves of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from solver.module_checkpointing.region_plan import RegionPlan, plan_regions
from solver.module_checkpointing.regions import CheckpointRegion

N_BUDGETS = 12
N_SLOTS = 200
MAX_DEPTH = 16
"""Frameworks run nested checkpoints by recursion, some Python frames deep for each."""


@dataclass(frozen=True)
class SequentialSteps:
    """Steps that run one after another.

    nodes: by step, its forward nodes in the graph.
    modules: by step, the paths of its modules.
    chain: the same as a chain, for proposals.
    """

    nodes: tuple[tuple[str, ...], ...]
    modules: tuple[tuple[str, ...], ...]
    chain: Chain


def nested_regions(ops: Sequence[ChainOp], steps: SequentialSteps) -> tuple[CheckpointRegion, ...]:
    """The checkpoints that carry out a persistent schedule of `solve_chain`."""
    position = 0  # in ops, which are read in the order of the recursion that wrote them

    def regions(s: int, t: int) -> tuple[CheckpointRegion, ...]:
        """Of blocks s .. t (the loss is the last), reading all their operations."""
        nonlocal position
        left: list[tuple[int, int] | None] = []  # what is left to do, last first; None: a backward
        while s <= t:
            op = ops[position]
            position += 1
            if isinstance(op, Backward):  # of the loss, which has no forward of its own
                break
            first = s
            s += 1
            if isinstance(op, ForwardKeepingAll):
                left.append(None)
                continue
            while position < len(ops) and isinstance(ops[position], ForwardKeepingOutput):
                position += 1
                s += 1
            left.append((first, s - 1))
        found: list[CheckpointRegion] = []
        for blocks in reversed(left):
            if blocks is None:
                position += 1
                continue
            first, last = blocks
            found.append(
                CheckpointRegion(
                    nodes=tuple(name for step in steps.nodes[first - 1 : last] for name in step),
                    modules=tuple(
                        path for step in steps.modules[first - 1 : last] for path in step
                    ),
                    inner=regions(first, last),
                )
            )
        return tuple(reversed(found))

    return regions(1, len(steps.nodes) + 1)


def best_in_loop(
    graph: Graph, steps: SequentialSteps, *, budget_bytes: int
) -> tuple[RegionPlan | None, int]:
    """The fastest plan found that fits (None: none does), and the smallest peak found, in bytes."""
    plan = plan_regions(graph, (), in_loop=True)
    least_bytes = plan.peak_bytes
    if least_bytes <= budget_bytes:
        return plan, least_bytes
    best: RegionPlan | None = None
    low, high = 0, simulate_chain(steps.chain, keeping_everything(steps.chain))[1]
    for _ in range(N_BUDGETS):
        middle = (low + high) // 2
        answer = solve_chain(steps.chain, budget_bytes=middle, n_slots=N_SLOTS)
        regions = () if answer is None else nested_regions(answer.ops, steps)
        if answer is None or max((r.depth for r in regions), default=0) > MAX_DEPTH:
            low = middle
            continue
        plan = plan_regions(graph, regions, in_loop=True)
        least_bytes = min(least_bytes, plan.peak_bytes)
        if plan.peak_bytes > budget_bytes:
            high = middle
            continue
        low = middle
        best = plan if best is None else min(best, plan, key=lambda plan: plan.rank)
    return best, least_bytes
