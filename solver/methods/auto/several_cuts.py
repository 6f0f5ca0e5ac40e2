"""Cut where the schedule overflows: from one cut to several, each round simulated.

The cuts' sets are replayed; the positions at which the simulator sees the budget overrun join the
program, and it is solved again. Without allowances its dual bound is a proof for the budget. A
position that is a cut already and still overflows does so because of what the recomputation right
before it takes, of which the rows know nothing: it gets that many bytes as an allowance, and from
then on the program proves nothing and serves as a guide only.
"""

from __future__ import annotations

from solver.bound import CutMilp, Cuts
from solver.methods.auto.search import Search

MAX_ROUNDS = 6
"""Times that the overflowing positions are added to the cuts."""
N_NEW_POSITIONS = 3
"""Positions that one round adds at most."""
LEAST_DISTANCE = 5
"""Between the positions of one round: neighbours mostly say the same."""
MAX_POSITIONS = 7
MAX_COLUMNS = 2_000
"""Of the program: beyond these one solve takes ten seconds and more."""
NODES_TIMES_COLUMNS = 30_000
"""Branch-and-bound nodes times columns of one solve that proves something."""
FAR_BELOW = 0.1
"""Of the baseline's time: where windows have proven so much more than cuts, a program is solved in
full only if its root is not so far below. On the U-Net at its least budget 8 s in place of 14.
"""
LEAST_GAIN = 1e-3
"""Of the baseline's time: cuts that raise the bound by less are not worth a larger program."""
GAP = 3e-4
"""A program is solved to within this share of the baseline's time."""


def offer_several_cuts(
    search: Search, cuts: Cuts, *, max_columns: int = MAX_COLUMNS
) -> dict[int, frozenset[int]]:
    """Offer what the cuts give, round by round; the last guide whose bytes no allowance cut."""
    allowance_bytes = dict.fromkeys(cuts.positions, 0)
    proven_guide: dict[int, frozenset[int]] = {}
    by_cuts = search.binding.lost_share  # other stages may have proven more: no reason to end here
    for _ in range(MAX_ROUNDS):
        if cuts.kept is None:
            break
        guide = dict(zip(cuts.positions, cuts.kept, strict=True))
        if not any(allowance_bytes.values()):
            proven_guide = guide
        played = search.offer_cuts(guide)
        if played is None or search.close:
            break
        over = played.overflowing(
            search.budget_bytes, n_most=N_NEW_POSITIONS, distance=LEAST_DISTANCE
        )
        for p in over:
            if p in allowance_bytes:
                allowance_bytes[p] += played.stage_bytes[p] - search.budget_bytes
            else:
                allowance_bytes[p] = 0
        program = CutMilp(
            search.folded,
            positions=sorted(allowance_bytes),
            budget_bytes=search.budget_bytes,
            allowance_bytes=allowance_bytes,
            deadline=search.deadline,
        )
        too_large = len(allowance_bytes) > MAX_POSITIONS or program.n_columns > max_columns
        if not over or too_large:
            break
        proves = not any(allowance_bytes.values())
        cuts = _solve(search, program, by_cuts, proves=proves)
        if not any(allowance_bytes.values()) and cuts.lost_share < by_cuts + LEAST_GAIN:
            break
        by_cuts = max(by_cuts, cuts.lost_share)
    return proven_guide


def _solve(search: Search, program: CutMilp, by_cuts: float, *, proves: bool) -> Cuts:
    """by_cuts: what they have proven before, as a share of the baseline's time.
    proves: whether what this proves holds for the budget.
    """

    def solved(node_limit: int) -> Cuts:
        answer = program.program.solve(
            whole=True, gap=GAP, node_limit=node_limit, deadline=search.deadline
        )
        return program.read(answer)

    n_nodes = max(1, NODES_TIMES_COLUMNS // max(1, program.n_columns))
    hopeless = search.lost_share - FAR_BELOW
    cuts = solved(1 if by_cuts < hopeless else n_nodes)
    if by_cuts < hopeless < cuts.lost_share and proves:
        cuts = solved(n_nodes)
    if proves:
        search.prove(cuts.lost_share)
    search.timed_out = search.timed_out or cuts.timed_out
    return cuts
