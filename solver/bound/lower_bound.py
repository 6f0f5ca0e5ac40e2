"""What no schedule can beat: the least time within a budget, and the minimum budget.

The bound is the largest cut bound over all positions tried. `solver.bound.cut` states and proves it
for every schedule that the simulator accepts: first computations in the order of the graph, later
nodes run once, recomputation anywhere and in any order. Each position gives a valid bound by
itself, so trying only a few is valid too, just less sharp. The LP relaxation (milliseconds) is
solved at the positions where the baseline holds most; on no graph of the benchmark did one of their
neighbours bound better. The best ones are then solved as MILPs, stopped when their dual bound is
within GAP of the baseline's time; the dual bound counts, not the solution. Where the baseline fits,
the bound is zero.

Weakness: the memory that recomputation itself takes is seen only at the positions, and its order
never. For tight budgets the bound is therefore weak; `solver.methods.auto.stages` sharpens it with
several cuts at once.

The minimum budget is bounded from below by the most that any one op must have on the device (its
inputs, outputs, workspace, and what later ops need and cannot be recomputed) or, if that is more,
by the least budget at which no cut's LP is infeasible. `solver.methods.least_budget` approaches it
from above, by greedy eviction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from graphs.graph import Graph
from solver.bound.copies import CopyCut, CopyMilp
from solver.bound.cut import Cuts, solve_cuts
from solver.bound.storage_graph import StorageGraph
from solver.schedule import Places
from solver.sizes_deadlines_progress import NEVER, Deadline

GAP = 1e-4
"""A MILP stops when its bound is within this share of the baseline's time of its solution."""
PROOF_TOLERANCE = 1e-5
"""The proven minimum budget is within this share of the largest that these LPs could prove."""
N_POSITIONS = 12
"""Maximum number of positions at which the LP is solved, not counting the tightest one."""


def lower_bound_s(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float = math.inf,
    places: Places | None = None,
) -> float:
    """Seconds for the whole step that no schedule within the budget can beat; inf: nothing fits.

    time_limit_s: ends the search early, with what is proven by then. Without it the work is limited
        by counts.
    places: where a schedule may copy tensors to.
    """
    deadline = Deadline.after(time_limit_s)
    places = None if places is None else places.without_state(graph.host_state_bytes)
    if places is not None and places.host is not None:
        offloadable = StorageGraph.of(graph, may_offload=True)
        copies = binding_copy_cut(
            offloadable, budget_bytes=budget_bytes, places=places, deadline=deadline
        )
        return least_time_s(graph, lost_share=copies.lost_share)
    found = binding_cut(StorageGraph.of(graph), budget_bytes=budget_bytes, deadline=deadline)
    return least_time_s(graph, lost_share=found.lost_share)


def least_time_s(graph: Graph, *, lost_share: float) -> float:
    """Seconds of a step that loses this share of the baseline's time; inf if the share is inf."""
    # For a step that takes no time, the product would be 0 * inf: NaN.
    return math.inf if math.isinf(lost_share) else graph.baseline_time_s * (1.0 + lost_share)


def proven_least_budget_bytes(
    folded: StorageGraph, *, deadline: Deadline = NEVER
) -> tuple[int, int]:
    """Bytes below which provably no schedule fits, and the position that proves it."""
    p = int(np.argmax(folded.least_bytes))
    proven_bytes = int(folded.least_bytes[p])
    must_keep = (
        not folded.recomputable[n] and any(folded.uses[u] for u in folded.makes[n])
        for n in range(folded.n_forward)
    )
    if not any(must_keep):
        return proven_bytes, p
    # A node that cannot be recomputed may have to be kept to recompute others: only a cut sees it.
    infeasible = _first_infeasible_position(folded, budget_bytes=proven_bytes, deadline=deadline)
    if infeasible is None:
        return proven_bytes, p
    low, high, p = proven_bytes + 1, int(np.max(folded.baseline_bytes)), infeasible
    while high - low > PROOF_TOLERANCE * high and not deadline.passed:
        middle = (low + high) // 2
        infeasible = _first_infeasible_position(folded, budget_bytes=middle, deadline=deadline)
        if infeasible is None:
            high = middle
        else:
            low, p = middle + 1, infeasible
    return low, p


def _first_infeasible_position(
    folded: StorageGraph, *, budget_bytes: int, deadline: Deadline
) -> int | None:
    """The first of the fullest positions whose cut's LP is infeasible; None: none is known."""
    for p in fullest_positions(folded, budget_bytes=budget_bytes):
        if math.isinf(_lp_share(folded, p, budget_bytes, deadline)):
            return p
    return None


def _lp_share(folded: StorageGraph, p: int, budget_bytes: int, deadline: Deadline) -> float:
    """The lost share that the LP of the single cut at p proves; inf: infeasible."""
    return solve_cuts(
        folded, positions=[p], budget_bytes=budget_bytes, as_milp=False, deadline=deadline
    ).lost_share


def relaxed_bound(
    folded: StorageGraph, *, budget_bytes: int, n_positions: int, deadline: Deadline = NEVER
) -> float:
    """The lost share that the LPs of the fullest positions prove; inf: nothing fits.

    This is what `binding_cut` proves without its MILPs, in milliseconds.
    """
    if int(np.max(folded.least_bytes)) > budget_bytes:
        return math.inf
    positions = fullest_positions(folded, budget_bytes=budget_bytes)[:n_positions]
    return max((_lp_share(folded, p, budget_bytes, deadline) for p in positions), default=0.0)


@dataclass(frozen=True)
class Binding:
    """The strongest single cut found.

    lost_share: proven, as a share of the baseline's time (inf: nothing fits).
    ranked_positions: positions with the lost share that their LP proves, the largest first.
    cuts: the MILP's answer at the best position (None: not solved).
    """

    lost_share: float
    ranked_positions: tuple[tuple[int, float], ...]
    cuts: Cuts | None
    timed_out: bool = False


def binding_cut(folded: StorageGraph, *, budget_bytes: int, deadline: Deadline = NEVER) -> Binding:
    """Search for the position whose cut loses the most time, as the module describes."""
    if int(np.max(folded.least_bytes)) > budget_bytes:
        return Binding(math.inf, (), None)
    lp_shares: dict[int, float] = {}
    for p in fullest_positions(folded, budget_bytes=budget_bytes):
        if deadline.passed:
            break
        lp_shares[p] = _lp_share(folded, p, budget_bytes, deadline)
    ranked_positions = tuple(sorted(lp_shares.items(), key=lambda item: (-item[1], item[0])))
    if not ranked_positions or math.isinf(ranked_positions[0][1]):
        lost_share = ranked_positions[0][1] if ranked_positions else 0.0
        return Binding(
            lost_share, ranked_positions, None, timed_out=not ranked_positions and deadline.passed
        )
    lost_share, best_cuts, timed_out = ranked_positions[0][1], None, False
    for p, lp_share in ranked_positions[:2]:
        # A second MILP is only worth solving where the LP proves nearly as much as the best.
        if lp_share < 0.98 * ranked_positions[0][1] or deadline.passed:
            break
        cuts = solve_cuts(
            folded,
            positions=[p],
            budget_bytes=budget_bytes,
            as_milp=True,
            gap=GAP,
            deadline=deadline,
        )
        timed_out = timed_out or cuts.timed_out
        if best_cuts is None or cuts.lost_share > lost_share:
            best_cuts = cuts
        lost_share = max(lost_share, cuts.lost_share)
    timed_out = timed_out or deadline.passed
    return Binding(lost_share, ranked_positions, best_cuts, timed_out=timed_out)


@dataclass(frozen=True)
class CopyBinding:
    """What the LPs of single cuts with copies prove.

    lost_share: proven, as a share of the baseline's time (inf: nothing fits).
    ranked_cuts: the cuts, the strongest first.
    """

    lost_share: float
    ranked_cuts: tuple[CopyCut, ...]


def binding_copy_cut(
    folded: StorageGraph, *, budget_bytes: int, places: Places, deadline: Deadline = NEVER
) -> CopyBinding:
    """Search for the position whose cut with copies loses the most time.

    folded: folded with `may_offload`.
    """
    if int(np.max(folded.least_bytes)) > budget_bytes:
        return CopyBinding(math.inf, ())
    cuts = []
    for p in fullest_positions(folded, budget_bytes=budget_bytes):
        if deadline.passed:
            break
        program = CopyMilp(folded, position=p, budget_bytes=budget_bytes, places=places)
        cuts.append(program.solve(as_milp=False, deadline=deadline))
    ranked_cuts = tuple(sorted(cuts, key=lambda cut: (-cut.lost_share, cut.position)))
    return CopyBinding(ranked_cuts[0].lost_share if ranked_cuts else 0.0, ranked_cuts)


def fullest_positions(folded: StorageGraph, *, budget_bytes: int) -> list[int]:
    """Positions to try: local peaks of the baseline's memory above the budget.

    Half of them are the highest peaks, half are spread over the step; among them is also the
    position above the budget at which any schedule needs most. Empty if the baseline fits.
    """
    live = folded.baseline_bytes
    is_over = live > budget_bytes
    neighbours = np.maximum(np.r_[0, live[:-1]], np.r_[live[1:], 0])
    peaks = np.flatnonzero(is_over & (live >= neighbours))
    if not len(peaks):
        return []
    highest = peaks[np.argsort(-live[peaks], kind="stable")][: N_POSITIONS // 2]
    spread = peaks[np.linspace(0, len(peaks) - 1, N_POSITIONS // 2).astype(int)]
    tightest = np.argmax(np.where(is_over, folded.least_bytes, -1))
    return [int(p) for p in dict.fromkeys([*highest, tightest, *spread])]
