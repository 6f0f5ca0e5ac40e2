"""Deep chains near their least budget: the bound of nested reversals, and replays of reversals.

Where stretches of the forward pass are recomputed again and again, cuts prove little and greedy
eviction finds little. There `solver.chain.nested_reversal_bound` proves far more than cuts do,
which also tells that this is such a step. Then reversals of the chain of blocks with more and more
snapshots are tried; those that overflow are replayed within the budget
(`solver.methods.auto.replay`), as many snapshots as help. Elsewhere nothing is tried.
"""

from __future__ import annotations

from solver.bound import relaxed_bound
from solver.chain import Blocks, reversal_bound, split_into_blocks
from solver.methods.auto.replay import replay_within
from solver.methods.auto.search import Search
from solver.methods.revolve import is_long, reversal_to_schedule

MAX_SNAPSHOTS = 32
"""Of a reversal that is tried."""
MAX_REPLAYS = 2
"""Reversals that overflow and are replayed; the second mostly is a little better or much worse."""
WORK_PER_OP = 800
"""Of a replay, for each op of its order: about 5 s for the longest of the benchmark."""
FAR_ABOVE = 0.1
"""Reversals must prove so much more than cuts, as a share of the baseline's time. On steps where
they prove a little more, eviction and recombination still find faster schedules.
"""
LARGE_NODES = 500
"""On steps of fewer nodes the other stages take seconds, and are not left out."""
N_CUTS = 3
"""Linear programs that say what cuts prove."""


def nested_reversals(search: Search) -> None:
    """Prove what reversals prove, and offer replays where that is far more than cuts prove."""
    blocks = split_into_blocks(search.graph)
    if prove_by_reversals(search, blocks):
        _replay_reversals(search, blocks)


def prove_by_reversals(search: Search, blocks: Blocks) -> bool:
    """Prove what reversals prove. Whether that is far more than cuts prove."""
    folded, budget_bytes = search.folded, search.budget_bytes
    if search.done or int(folded.least_bytes.max()) > budget_bytes:
        return False
    lost_share = reversal_bound(folded, blocks, budget_bytes=budget_bytes, deadline=search.deadline)
    search.prove(lost_share)
    if lost_share <= FAR_ABOVE:
        return False
    by_cuts = relaxed_bound(
        folded, budget_bytes=budget_bytes, n_positions=N_CUTS, deadline=search.deadline
    )
    is_far_above = lost_share > by_cuts + FAR_ABOVE
    search.is_nested = is_far_above and folded.n_nodes >= LARGE_NODES
    return is_far_above


def _replay_reversals(search: Search, blocks: Blocks) -> None:
    folded, n_replayed = search.folded, 0
    for n_snapshots in range(1, min(MAX_SNAPSHOTS, blocks.n_blocks)):
        if is_long(blocks, n_snapshots):
            continue
        schedule = reversal_to_schedule(search.graph, blocks, n_snapshots, search.deadline)
        found = search.offer(schedule)
        if found is None or found.simulation.peak_bytes <= search.budget_bytes:
            continue
        before = search.best_share
        replayed, _ = replay_within(
            folded,
            schedule.order,
            budget_bytes=search.budget_bytes,
            max_work=WORK_PER_OP * len(schedule.order),
            deadline=search.deadline,
        )
        if replayed is not None:
            search.offer(replayed)
            search.offer_improved(replayed)
        n_replayed += 1
        if n_replayed == MAX_REPLAYS or search.best_share >= before:
            break
