"""`dp` on a graph: solve the chain of its blocks, turn the answer into a schedule, simulate it.

The chain is a model of the graph (`solver.chain.from_graph`), so its budget is not the graph's: the
method bisects for the largest chain budget whose answer fits when simulated.

Olivier Beaumont, Lionel Eyraud-Dubois, Julien Herrmann, Alexis Joly, Alena Shilova: Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited memory,
arXiv:1911.13214 (2019), known as rotor. Optimal for a chain of unequal blocks among persistent
schedules, in which a block is kept whole, by its input, or not at all. On a graph it falls short
where blocks are coarse, since it cannot keep the expensive half of one, and where the model is off:
it charges a recomputed block for ops at its end that do not run. Therefore a second bisection keeps
the input of every block, and the schedule of `sqrt` is simulated as well; so it is never worse than
that or `every_block`.

Where gradients of parameters accumulate, the backward pass begins with room for many checkpoints
and ends with room for few. In a deep chain near its minimum budget no equal blocks fit. Then blocks
are sized by the room that their backward segments leave, and there are more of them: 1000 residual
blocks at their minimum budget lose 42.2 % instead of 249.6 by `revolve`.

Cost: some dozen chain problems of at most DP_MAX_BLOCKS blocks; if nothing fits, eight of at most
FINE_MAX_BLOCKS, a second or two each.
"""

from __future__ import annotations

from functools import partial
from statistics import median_low

from graphs.graph import Graph
from solver.chain import (
    Blocks,
    Chain,
    chain_to_schedule,
    constant_bytes,
    room_bytes,
    solve_chain,
    split_into_blocks,
    to_chain,
)
from solver.methods.best_so_far import ANY_TIME, BestSoFar
from solver.methods.proposal import Proposal
from solver.methods.sqrt import sqrt
from solver.schedule import baseline

DP_MAX_BLOCKS = 64
FINE_MAX_BLOCKS = 200
N_BISECTIONS = 8
N_SLOTS = 500
"""Approximate number of slots of a chain problem."""


def dp(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    seed: int,
    worth_between_s: tuple[float, float] = ANY_TIME,
) -> Proposal:
    """The optimal persistent schedule of the chain, for the best chain budget. No randomness.

    worth_between_s: as in `BestSoFar`.
    """
    with BestSoFar(
        graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, worth_between_s=worth_between_s
    ) as search:
        if search.fits(baseline(graph)):
            return search.proposal()
        search.deadline.check()
        left_s = search.deadline.left_s
        by_sqrt = sqrt(
            graph,
            budget_bytes=budget_bytes,
            time_limit_s=left_s,
            seed=seed,
            worth_between_s=worth_between_s,
        )
        if by_sqrt.schedule:
            search.fits(by_sqrt.schedule)
        blocks = split_into_blocks(graph, max_blocks=DP_MAX_BLOCKS)
        guess_bytes = budget_bytes - constant_bytes(graph, blocks)
        if blocks.n_blocks and guess_bytes > 0:
            raise_budget = partial(_raise_budget, search, blocks, to_chain(graph, blocks))
            most_bytes = raise_budget(0, 2 * guess_bytes, keep_inputs=False)
            raise_budget(most_bytes // 2, most_bytes, keep_inputs=True)
        if search.best is None:
            _with_blocks_by_room(search)
    return search.proposal()


def _with_blocks_by_room(search: BestSoFar) -> None:
    """If the graph has more than DP_MAX_BLOCKS blocks: try more of them, sized by the room."""
    graph, budget_bytes = search.graph, search.budget_bytes
    fine = split_into_blocks(graph)
    if fine.n_blocks <= DP_MAX_BLOCKS:
        return
    room = room_bytes(graph, fine, budget_bytes=budget_bytes)
    blocks = split_into_blocks(graph, max_blocks=FINE_MAX_BLOCKS, room_bytes=room)
    left_bytes = budget_bytes - constant_bytes(graph, blocks)
    if left_bytes > 0:
        chain = to_chain(graph, blocks)
        _raise_budget(search, blocks, chain, 0, 2 * left_bytes, keep_inputs=False)


def _raise_budget(
    search: BestSoFar, blocks: Blocks, chain: Chain, low: int, high: int, *, keep_inputs: bool
) -> int:
    """Bisect for the largest chain budget, up to `high`, whose answer fits the graph.

    keep_inputs: keep the input of every block.
    """
    to_schedule = partial(
        chain_to_schedule, search.graph, blocks, keep_inputs=keep_inputs, deadline=search.deadline
    )

    median_bytes = median_low([size for size in chain.input_bytes if size] or [1])

    def fits(size_bytes: int) -> bool:
        # With the median input a whole number of slots, rounding costs less.
        n_slots = size_bytes * (N_SLOTS * median_bytes // size_bytes) // median_bytes or N_SLOTS
        solution = solve_chain(chain, budget_bytes=size_bytes, n_slots=n_slots)
        if solution is None:
            return True
        schedule = to_schedule(solution.ops)
        if keep_inputs:
            return search.try_larger(schedule.order, lambda: schedule)
        # Simulated however slow it is: the pass with keep_inputs begins at what fits here.
        return search.may_fit(schedule.order) and search.fits(schedule)

    return search.bisect(fits, low, high, tolerance=max(1, high // 2**N_BISECTIONS))[1]
