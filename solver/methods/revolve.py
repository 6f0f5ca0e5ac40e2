"""`revolve` on a graph: reverse the chain of its blocks with the most snapshots that fit.

Andreas Griewank, Andrea Walther: Algorithm 799: revolve, ACM TOMS 26 (2000). Fewest forward steps
for a chain of equal steps and a number of snapshots. On a graph it falls short where steps are
unequal, and where there is memory for more than inputs: it recomputes every block but the last. It
reaches the smallest budgets on deep chains if every block is a step of its own; both these and at
most REVOLVE_MAX_BLOCKS coarser ones are tried.

Cost: log L reversals, each turned into a schedule of the graph and simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphs.graph import Graph
from solver.chain import (
    Blocks,
    chain_to_schedule,
    n_extra_steps,
    reversal,
    reversal_ops,
    split_into_blocks,
)
from solver.methods.best_so_far import ANY_TIME, BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import Schedule, baseline
from solver.sizes_deadlines_progress import NEVER, Deadline

REVOLVE_MAX_BLOCKS = 128
MAX_RUNS = 20
"""A reversal whose blocks run more often on average is skipped: with few snapshots the first blocks
of a long chain would run endlessly.
"""


def revolve(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    seed: int,
    worth_between_s: tuple[float, float] = ANY_TIME,
) -> Proposal:
    """The reversal with the most snapshots that fit. No randomness.

    worth_between_s: as in `BestSoFar`.
    """
    with BestSoFar(
        graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, worth_between_s=worth_between_s
    ) as search:
        if search.fits(baseline(graph)):
            return search.proposal()
        coarse = split_into_blocks(graph, max_blocks=REVOLVE_MAX_BLOCKS)
        fine = split_into_blocks(graph)
        for blocks in (coarse, fine) if fine.n_blocks > coarse.n_blocks else (coarse,):

            def fits(n_snapshots: int, blocks: Blocks = blocks) -> bool:
                if recomputes_too_often(blocks, n_snapshots):
                    return True
                schedule = reversal_to_schedule(graph, blocks, n_snapshots, search.deadline)
                return search.try_larger(schedule.order, lambda: schedule)

            if not _is_slow(graph, blocks, search):
                search.bisect(fits, 0, blocks.n_blocks + 1)
    return search.proposal()


def _is_slow(graph: Graph, blocks: Blocks, search: BestSoFar) -> bool:
    """Whether every reversal is too slow to be worth a simulation.

    The reversal with a snapshot for each block is taken to be the fastest: every block but the last
    runs twice, and more often with fewer snapshots.
    """
    if not blocks.n_blocks or math.isinf(search.worth_between_s[1]):
        return False
    fastest = reversal_to_schedule(graph, blocks, blocks.n_blocks, search.deadline)
    return search.time_s(fastest.order) > search.worth_between_s[1]


def reversals(graph: Graph, *, deadline: Deadline = NEVER) -> Iterator[Schedule]:
    """Yield reversals of all blocks with more and more snapshots, starting with the smallest peaks.

    Those for which `recomputes_too_often` holds are left out. Raises OutOfTimeError.
    """
    deadline.check()
    blocks = split_into_blocks(graph)
    n_snapshots = 1
    while n_snapshots < blocks.n_blocks:
        if not recomputes_too_often(blocks, n_snapshots):
            yield reversal_to_schedule(graph, blocks, n_snapshots, deadline)
        n_snapshots += 1 + n_snapshots // 2


def recomputes_too_often(blocks: Blocks, n_snapshots: int) -> bool:
    """Whether the reversal recomputes blocks more than MAX_RUNS times on average."""
    n_steps = blocks.n_blocks
    return n_extra_steps(n_steps=n_steps, n_snapshots=n_snapshots) > MAX_RUNS * n_steps


def reversal_to_schedule(
    graph: Graph, blocks: Blocks, n_snapshots: int, deadline: Deadline = NEVER
) -> Schedule:
    """The reversal of the blocks as a schedule. Raises OutOfTimeError."""
    actions = reversal(n_steps=blocks.n_blocks, n_snapshots=n_snapshots)
    ops = reversal_ops(blocks.n_blocks, actions)
    return chain_to_schedule(graph, blocks, ops, deadline=deadline)
