"""Deep chains near their minimum budget: the bound of nested reversals, and replays of reversals.

Where stretches of the forward pass are recomputed again and again, cuts prove little and greedy
eviction finds little. On such a step `solver.chain.nested_reversal_bound` proves far more than
cuts, by which it is recognised. Then reversals of the chain of blocks are tried, with more and more
snapshots. Those that exceed the budget are replayed within it (`solver.methods.auto.replay`), until
more snapshots no longer help. On other steps nothing is tried.
"""

from __future__ import annotations

from solver.bound import relaxed_bound
from solver.chain import Blocks, reversal_bound, split_into_blocks
from solver.methods.auto.replay import replay_within
from solver.methods.auto.search import Search
from solver.methods.revolve import recomputes_too_often, reversal_to_schedule

MAX_SNAPSHOTS = 32
"""Reversals with fewer snapshots than this are tried."""
MAX_REPLAYS = 2
"""Maximum reversals to replay; the second is mostly a little better or much worse."""
WORK_PER_OP = 800
"""Limit on the work of a replay, per op of its order: about 5 s for the benchmark's longest."""
FAR_ABOVE = 0.1
"""Reversals must prove so much more than cuts, as a share of the baseline's time. Where they prove
only a little more, eviction and recombination still find faster schedules.
"""
LARGE_NODES = 500
"""On steps of fewer nodes the other stages take seconds, and are not skipped."""
N_CUTS = 3
"""LPs of single cuts that are solved to see what cuts prove."""


def nested_reversals(search: Search) -> None:
    """Prove the bound of nested reversals; if it is far above that of cuts, offer replays."""
    blocks = split_into_blocks(search.graph)
    if prove_by_reversals(search, blocks):
        _replay_reversals(search, blocks)


def prove_by_reversals(search: Search, blocks: Blocks) -> bool:
    """Prove the bound of nested reversals. Returns whether it is far above that of cuts."""
    folded, budget_bytes = search.folded, search.budget_bytes
    if search.is_done or int(folded.least_bytes.max()) > budget_bytes:
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
    """Offer reversals with more and more snapshots, and replays of those that exceed the budget."""
    folded, n_replayed = search.folded, 0
    for n_snapshots in range(1, min(MAX_SNAPSHOTS, blocks.n_blocks)):
        if recomputes_too_often(blocks, n_snapshots):
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
