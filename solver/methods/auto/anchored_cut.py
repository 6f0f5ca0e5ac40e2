"""The single cut with anchors, for schedules that lack memory for long runs of recomputation.

A single cut counts each recomputed node once and ignores the bytes that recomputation takes. Where
it drops the narrow tensors of many blocks in a row (such as the states of a recurrent network,
cheap to recompute, each from the one before), its schedule recomputes them all at once and exceeds
the budget. So the chain of blocks (`solver.chain.blocks`) is divided into segments of a few blocks.
The tensors between segments, the anchors, must be held at the position of the cut, and the cut
decides about the rest. Then one segment is recomputed at a time, as in Chen et al. 2016, but the
cut chooses operators within and between segments. If the schedule still exceeds the budget, the cut
gets that many bytes less.

Optimal for nothing, and proves nothing: its schedules are simulated. Close to the bound on deep
chains of many small blocks; of no use where blocks are few or long skips cross them.

Cost: one LP, one schedule and one simulation for each segment length and round, linear in the graph
except for the LP.
"""

from __future__ import annotations

from solver.bound import CutMilp
from solver.chain import split_into_blocks
from solver.methods.auto.search import Search

SEGMENT_BLOCKS = (None, 64, 32, 16, 8, 4, 2, 1)
"""Blocks in a segment (None: no anchors, the cut itself)."""
MAX_ROUNDS = 4
"""Maximum times that the cut is solved with one segment length, each time with fewer bytes."""


def offer_anchored(search: Search, *, base: int) -> None:
    """Offer schedules of the cut at position `base`, with longer and shorter segments."""
    blocks = split_into_blocks(search.folded.graph)
    for n_blocks in SEGMENT_BLOCKS:
        if n_blocks is not None and n_blocks >= blocks.n_blocks:
            continue
        anchors: set[str] = set()  # storages that cross from one segment to the next, companions
        if n_blocks is not None:
            anchors = {name for crossing in blocks.crossing[::n_blocks] for name in crossing}
            anchors |= blocks.companions
        units = {u for u, name in enumerate(search.folded.unit_names) if name in anchors}
        less_bytes = 0
        for _ in range(MAX_ROUNDS):
            if search.is_done:
                break
            program = CutMilp(
                search.folded,
                positions=[base],
                budget_bytes=search.budget_bytes,
                allowance_bytes={base: less_bytes},
                deadline=search.deadline,
            )
            program.keep_everywhere(units)
            cuts = program.solve_lp_and_round()
            found = None if cuts.kept is None else search.offer_cuts(cuts.kept)
            if found is None:
                break
            over_bytes = found.simulation.peak_bytes - search.budget_bytes
            if over_bytes <= 0 and not search.is_close:
                search.offer_improved(found.schedule)
            if over_bytes <= 0 or search.is_close:
                break
            less_bytes += over_bytes
        if search.is_close:
            return
