"""From one cut to several: add a cut where the schedule exceeds the budget, round by round.

The cuts' sets are turned into a schedule and simulated. The positions at which the budget is
exceeded join the program, and it is solved again. Without allowances its dual bound is a proof for
the budget. If a position that is a cut already still exceeds the budget, that is because of what
the recomputation right before it takes, which the rows do not count. It gets that many bytes as an
allowance, and from then on the program proves nothing and serves only as a guide.
"""

from __future__ import annotations

from collections.abc import Mapping

from solver.bound import CutMilp, Cuts
from solver.methods.auto.search import Search

MAX_ROUNDS = 6
"""Maximum number of rounds."""
N_NEW_POSITIONS = 3
"""Maximum positions that one round adds."""
LEAST_DISTANCE = 5
"""Distance that the positions of one round must exceed: neighbours mostly say the same."""
MAX_POSITIONS = 7
MAX_COLUMNS = 2_000
"""Maximum columns of the program: with more, one solve takes ten seconds and more."""
NODES_TIMES_COLUMNS = 30_000
"""Branch-and-bound nodes times columns of one full solve."""
FAR_BELOW_GAP = 0.1
"""If windows have proven more than cuts by this share of the baseline's time, a program is solved
in full only if its root comes closer than that. On the U-Net at its minimum budget this takes 8 s
instead of 14.
"""
LEAST_GAIN = 1e-3
"""Cuts that raise the bound by less than this share of the baseline's time are not worth a larger
program.
"""
GAP = 3e-4
"""A program is solved to within this share of the baseline's time."""


def offer_several_cuts(
    search: Search, cuts: Cuts, *, max_columns: int = MAX_COLUMNS
) -> Mapping[int, frozenset[int]]:
    """Offer the schedules of the cuts, round by round.

    cuts: the solution of the strongest single cut.
    max_columns: a larger program ends the rounds.

    Returns the guide, by position the units held, of the last round without allowances.
    """
    allowance_bytes = dict.fromkeys(cuts.positions, 0)
    proven_guide: Mapping[int, frozenset[int]] = {}
    proven_by_cuts = search.binding.lost_share  # not search.lost_share: other stages may prove more
    for _ in range(MAX_ROUNDS):
        if cuts.kept is None:
            break
        if not any(allowance_bytes.values()):
            proven_guide = cuts.kept
        simulated = search.offer_cuts(cuts.kept)
        if simulated is None or search.is_close:
            break
        over_budget = simulated.overflowing_positions(
            search.budget_bytes, n_most=N_NEW_POSITIONS, distance=LEAST_DISTANCE
        )
        if not over_budget:
            break
        for p in over_budget:
            if p in allowance_bytes:
                allowance_bytes[p] += simulated.stage_bytes[p] - search.budget_bytes
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
        if too_large:
            break
        proves = not any(allowance_bytes.values())
        cuts = _solve(search, program, proven_by_cuts, proves=proves)
        if proves and cuts.lost_share < proven_by_cuts + LEAST_GAIN:
            break
        proven_by_cuts = max(proven_by_cuts, cuts.lost_share)
    return proven_guide


def _solve(search: Search, program: CutMilp, proven_by_cuts: float, *, proves: bool) -> Cuts:
    """Solve the program, briefly if it is unlikely to sharpen the bound.

    proven_by_cuts: the share of the baseline's time that cuts have proven before.
    proves: whether the program has no allowances, so that its bound holds for the budget.
    """

    def solve_up_to(node_limit: int) -> Cuts:
        answer = program.program.solve(
            as_milp=True, gap=GAP, node_limit=node_limit, deadline=search.deadline
        )
        return program.to_cuts(answer)

    n_nodes = max(1, NODES_TIMES_COLUMNS // max(1, program.n_columns))
    far_below_share = search.lost_share - FAR_BELOW_GAP
    cuts = solve_up_to(1 if proven_by_cuts < far_below_share else n_nodes)
    if proven_by_cuts < far_below_share < cuts.lost_share and proves:
        cuts = solve_up_to(n_nodes)
    if proves:
        search.prove(cuts.lost_share)
    search.timed_out = search.timed_out or cuts.timed_out
    return cuts
