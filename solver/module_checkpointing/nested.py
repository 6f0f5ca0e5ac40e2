"""Nested checkpoints around consecutive steps, and the best choice of them within a budget.

Each step reads only what the step before it made, like the modules of an nn.Sequential. Then any
consecutive steps can be recomputed together, with further checkpoints inside:

- `solver.chain.solve_chain` gives the fastest persistent schedule of a chain. Where it keeps
  x_{s-1}, runs forward to x_{k-1}, and comes back to steps s .. k-1 after everything behind them is
  done, the steps s .. k-1 are one checkpoint; how it then runs them says which checkpoints are
  inside. So every persistent schedule is a tree of checkpoints, which frameworks with nested
  checkpoints can run.
- A chain leaves out details of the graph (tensors that several steps save, nodes outside the
  steps). So each chain schedule is converted to regions of the graph (`plan_regions`) and
  simulated. The budget given to the chain is found by bisection, and the fastest plan that fits is
  taken.

Not optimal for the graph; for the chain, as `solve_chain` says. Cost: N_BUDGETS chain solves.
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
    ops_keeping_everything,
    simulate_chain,
    solve_chain,
)
from solver.module_checkpointing.region_plan import RegionPlan, plan_regions
from solver.module_checkpointing.regions import CheckpointRegion

N_BUDGETS = 12
N_SLOTS = 200
MAX_DEPTH = 16
"""How deep checkpoints may be nested: frameworks run them by recursion, with several Python frames
for each."""


@dataclass(frozen=True)
class SequentialSteps:
    """Steps of the forward pass that run one after another.

    nodes: for each step, its forward nodes.
    modules: for each step, the paths of its modules.
    chain: the steps as a chain, to be solved.
    """

    nodes: tuple[tuple[str, ...], ...]
    modules: tuple[tuple[str, ...], ...]
    chain: Chain


def nested_regions(ops: Sequence[ChainOp], steps: SequentialSteps) -> tuple[CheckpointRegion, ...]:
    """Convert a persistent schedule of `solve_chain` into nested checkpoints."""
    position = 0  # the next op to read; the ops are in the order of the recursion below

    def regions(s: int, t: int) -> tuple[CheckpointRegion, ...]:
        """The checkpoints of blocks s .. t (the last block is the loss); reads all their ops."""
        nonlocal position
        # what is left to do after the forward pass: (first, last) blocks to recompute; None: a
        # block's backward alone
        left: list[tuple[int, int] | None] = []
        while s <= t:
            op = ops[position]
            position += 1
            if isinstance(op, Backward):  # the loss, which has no forward op of its own
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
    """Search for the fastest checkpoints of these steps that fit the budget.

    Returns the plan (None: none fits), and the smallest peak found in bytes.
    """
    plan = plan_regions(graph, (), in_loop=True)
    least_bytes = plan.peak_bytes
    if least_bytes <= budget_bytes:
        return plan, least_bytes
    best: RegionPlan | None = None
    # Bisect the chain's budget: the graph needs other bytes than the chain.
    low, high = 0, simulate_chain(steps.chain, ops_keeping_everything(steps.chain))[1]
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
