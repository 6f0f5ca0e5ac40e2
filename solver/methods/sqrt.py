"""Checkpoint the ends of k segments, recompute each segment once: sublinear memory.

Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin: Training Deep Nets with Sublinear Memory Cost,
arXiv:1604.06174 (2016). With k near the square root of the number of blocks L, the kept ends and
the one segment that is being recomputed take about equally much: O(√L) memory for at most one more
forward pass.

Here k and the number of segments kept whole follow from the budget. k is not √L but every small
number and a geometric choice of larger ones. For each k, as many of the last segments as fit are
kept whole. The fastest schedule that fits is returned. One segment, kept whole, is the step without
checkpointing; as many segments as blocks, with one whole, is `every_block`.

Optimal for nothing. Segments save equal bytes, regardless of what they cost to recompute; each is
kept whole or not at all, however cheap a part of it is; nothing is recomputed twice, so budgets
below about 2√L blocks are out of reach.

Cost: some 15 values of k times log L schedules, each linear in the graph.
"""

from __future__ import annotations

from functools import partial

from graphs.graph import Graph
from solver.chain import Blocks, checkpoints, split_into_blocks
from solver.methods.best_so_far import ANY_TIME, BestSoFar
from solver.methods.proposal import Proposal
from solver.schedule import free_after_last_use, keep_order

N_SEGMENTS_ALL_UP_TO = 6
N_SEGMENTS_GROWTH = 1.5


def sqrt(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    seed: int,
    worth_between_s: tuple[float, float] = ANY_TIME,
) -> Proposal:
    """The fastest schedule that fits, over the numbers of segments. No randomness.

    worth_between_s: as in `BestSoFar`.
    """
    with BestSoFar(
        graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, worth_between_s=worth_between_s
    ) as search:
        counts = segment_counts(split_into_blocks(graph).n_blocks)
        for n_segments in reversed(counts):  # the best ones are found early
            if search.time_is_up():
                break
            segments = split_into_blocks(graph, max_blocks=n_segments)

            def fits(n_whole: int, segments: Blocks = segments) -> bool:
                # More whole segments are faster. If these would not beat the best, go on to more
                # without a simulation.
                order = keep_order(graph, checkpoints(graph, segments, n_whole=n_whole))
                return not search.is_faster(order) or search.try_larger(
                    order, partial(free_after_last_use, graph, order)
                )

            one = min(1, segments.n_blocks)  # often the best that fits, so it is tried first
            if fits(one):
                search.bisect(fits, one, segments.n_blocks + 1)
            elif one:
                fits(0)
    return search.proposal()


def segment_counts(n_blocks: int) -> list[int]:
    """The values of k: all up to 6, then growing by half, and finally the number of blocks."""
    counts = list(range(1, max(1, min(n_blocks, N_SEGMENTS_ALL_UP_TO)) + 1))
    while counts[-1] < n_blocks:
        counts.append(min(n_blocks, int(counts[-1] * N_SEGMENTS_GROWTH)))
    return counts
