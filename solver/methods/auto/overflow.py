"""Choose what to copy so that an order of nodes fits the budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from solver.bound import StorageGraph
from solver.methods.auto.copy_placement import Gap, find_gaps, live_bytes_by_run


def gaps_to_offload(
    folded: StorageGraph, order: Sequence[str], budget_bytes: int, *, offloaded: Iterable[Gap] = ()
) -> list[Gap]:
    """Gaps to spend on the host so that the order fits, the longest first.

    If it cannot fit, all gaps that help.
    offloaded: gaps that are spent on the host already.
    """
    live = live_bytes_by_run(folded.graph, order)
    for gap in offloaded:
        live[gap.first + 1 : gap.last] -= folded.unit_bytes[gap.unit]
    gaps = sorted(set(find_gaps(folded, order)).difference(offloaded))
    gaps.sort(key=lambda gap: gap.first - gap.last)
    chosen = []
    for gap in gaps:
        span = live[gap.first + 1 : gap.last]
        if int(span.max()) > budget_bytes:
            span -= folded.unit_bytes[gap.unit]
            chosen.append(gap)
    for gap in chosen[:]:  # remove those that became unnecessary through later choices
        span = live[gap.first + 1 : gap.last]
        if int(span.max()) + folded.unit_bytes[gap.unit] <= budget_bytes:
            span += folded.unit_bytes[gap.unit]
            chosen.remove(gap)
    return chosen
