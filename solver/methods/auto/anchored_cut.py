"""The single cut with anchors: what its replay lacks is memory for long runs of recomputation.

A single cut counts each recomputed node once and knows nothing of the bytes that this takes. Where
it drops the narrow tensors of many blocks in a row (the states of a recurrent net, which cost
little to recompute, each from the one before), the replay recomputes them all at once and
overflows. So the chain of blocks (`solver.chain.blocks`) is cut into segments of a few blocks, the
tensors between segments are held at the position of the cut by decree, and the cut decides the
rest. What is recomputed at a time is then of one segment, as in Chen et al. 2016, but within and
between segments the operators are chosen by the cut. Where the replay still overflows, the cut gets
that many bytes less.

Optimal for nothing, and proves nothing: its answers are replayed and simulated. Close to the bound
on deep chains of many small blocks; of no use where blocks are few or long skips cross them.

Cost: one LP, one replay and one simulation for each length of segment and round, linear in the
graph but for the LP.
"""

from __future__ import annotations

from solver.bound import CutMilp
from solver.chain import split_into_blocks
from solver.methods.auto.search import Search

SEGMENT_BLOCKS = (None, 64, 32, 16, 8, 4, 2, 1)
"""Blocks from anchor to anchor (None: no anchors, the cut itself)."""
MAX_ROUNDS = 4
"""Times that the cut is solved with fewer bytes."""


def offer_anchored(search: Search, *, base: int) -> None:
    """Offer the replays of the cut at position `base`, with anchors further and less far apart."""
    blocks = split_into_blocks(search.folded.graph)
    for n_blocks in SEGMENT_BLOCKS:
        if n_blocks is not None and n_blocks >= blocks.n_blocks:
            continue
        anchors: set[str] = set()  # what crosses from one segment to the next, or accompanies all
        if n_blocks is not None:
            anchors = {name for crossing in blocks.crossing[::n_blocks] for name in crossing}
            anchors |= blocks.companions
        units = {u for u, name in enumerate(search.folded.unit_names) if name in anchors}
        less_bytes = 0
        for _ in range(MAX_ROUNDS):
            if search.done:
                break
            program = CutMilp(
                search.folded,
                positions=[base],
                budget_bytes=search.budget_bytes,
                allowance_bytes={base: less_bytes},
                deadline=search.deadline,
            )
            program.hold(units)
            cuts = program.rounded()
            found = None if cuts.kept is None else search.offer_cuts({base: cuts.kept[0]})
            if found is None:
                break
            over_bytes = found.simulation.peak_bytes - search.budget_bytes
            if over_bytes <= 0 and not search.close:
                search.offer_improved(found.schedule)
            if over_bytes <= 0 or search.close:
                break
            less_bytes += over_bytes
        if search.close:
            return
