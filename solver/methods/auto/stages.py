"""`auto` on the device alone: whole models, operator by operator, in seconds, with a proof.

On deep chains near their minimum budget **nested reversals** come first
(`solver.methods.auto.nested_reversals`), and the other stages are skipped. Elsewhere:

1. **Single cut.** `solver.bound.binding_cut` finds the position whose cut loses the most recompute
   time. Its MILP gives the proven bound and a set S of storages to hold at that position. The
   schedule (`solver.methods.auto.from_cuts`) keeps S there and recomputes the rest just in time.
   Its recompute time is the cut's own cost: if it fits, it meets the bound up to the MILP's gap,
   and is optimal over everything the simulator accepts.
2. **Anchored cut** (`solver.methods.auto.anchored_cut`): the cut is solved again with the narrow
   tensors between segments held, so that less is recomputed at a time, and with fewer bytes.
3. **Other methods** are run too, so `auto` is never worse than they are by more than DONE_GAP.
4. **Eviction** (`solver.methods.evict`) runs the step within the budget, dropping what is cheapest
   to lose; `solver.methods.auto.local_optimum` removes recomputation for which there was room.
5. **Windows.** If a gap of WIDE_GAP is left, the LP of windows (`solver.bound.windows`) sees a
   stretch that is recomputed again and again, and sharpens the proof. **Several cuts**
   (`solver.methods.auto.several_cuts`): the positions that overflowed join, each with its byte row.
   The program is a relaxation, so its dual bound sharpens the proof as well. Eviction is repeated,
   dropping first what the cuts do not hold.
6. **Exact search** (`solver.methods.exact_search`) solves small graphs, of up to some thirty nodes,
   and ends the search.
7. **Recombination**: what the schedules simulated so far recomputed, whether they fit or not, forms
   menus, and `solver.methods.auto.recombine` finds the best schedule that can be put together from
   each short menu.

Once all variants of a step are planned, `solver.methods.auto.neighbourhoods` refines the fastest
plan if a gap is left, and with a long time limit `solver.methods.auto.last_proof` sharpens the
bound.

`benchmarks/results/ablation.md` shows what each stage contributes.

Rounding a relaxation and turning it into a schedule under the true memory rules is in the spirit of
Jain et al. 2020 (Checkmate, section 5), the eviction in that of Kirisame et al. 2021 (DTR); the
cuts and the recombination are ours. Proven: the bound, always; optimality if the gap closes. Not
proven: that a schedule is found if one exists, and whether a remaining gap is due to the schedule
or the bound.

Work is limited by counts of positions, rounds, branch-and-bound nodes and evictions, so the same
input gives the same schedule at any load of the machine. The time limit only ends a search early,
and then the proposal says so. If it does before the first eviction, one eviction is still run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from graphs.graph import Graph
from solver.bound import (
    TIME_ERROR,
    StorageGraph,
    binding_cut,
    lost_share_by_windows,
    proven_least_budget_bytes,
    solve_cuts,
)
from solver.methods.auto.anchored_cut import offer_anchored
from solver.methods.auto.nested_reversals import nested_reversals
from solver.methods.auto.recombine import recombine
from solver.methods.auto.search import Search
from solver.methods.auto.several_cuts import offer_several_cuts
from solver.methods.dp import dp
from solver.methods.every_block import every_block
from solver.methods.evict import MAX_RESTARTS, evict
from solver.methods.exact_search import any_schedule, fastest_schedule, is_small
from solver.methods.least_budget import LEAST_PATIENCE, PATIENCE, least_schedule
from solver.methods.proposal import Proposal
from solver.methods.revolve import revolve
from solver.schedule import OPTIMAL_GAP, Schedule, baseline
from solver.sizes_deadlines_progress import Deadline

ROOM_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Shares of the room that the cut leaves for its set. Smaller sets show what else can be
recomputed, and where.
"""
MAX_WORK, WORK_PER_NODE = 2_000_000, 4_000
"""Limit on the work of the evictions of one round: a second, or 2 ms for each node if that is more.
With a second for every graph, Llama with 32 layers at 33 GB had only the first eviction: 120 %
overhead instead of 18.
"""
WIDE_GAP = 0.1
"""Gap from which windows are used, as a share of the baseline's time. At larger budgets they prove
less than several cuts, which are solved as MILPs: U-Net at 10 % 25.4 % instead of 26.5.
"""
MAX_LAST_WORK = 15_000_000
"""Limit on the work of evictions with restarts, if nothing has been found: about five seconds."""
FALLBACK_SHARE, FALLBACK_S = 0.1, 1.0
"""Time beyond the time limit for one eviction if there was no time for any: a share of the limit,
and at least FALLBACK_S seconds if there is no schedule at all. One takes 0.3 s on 761 operators,
0.7 s on 3,500.
"""
OTHER_METHODS = (revolve, dp)
"""`dp` includes `sqrt` and what `every_block` does. `none` is tried first of all."""


def recompute_only(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    starts: Sequence[Schedule] = (),
    quick: bool = False,
    worth_below_share: float = math.inf,
) -> Proposal:
    """The best schedule found and the proven bound, by the stages of the module.

    starts: known schedules of this graph, such as those of a smaller budget.
    quick: only the stages that take about a second.
    worth_below_share: schedules that lose this share of the baseline's time or more are of no
        interest.
    """
    search = Search(
        StorageGraph.of(graph),
        budget_bytes=budget_bytes,
        time_limit_s=time_limit_s,
        worth_below_share=worth_below_share,
    )
    with search:
        search.offer(baseline(graph))
        for schedule in starts:
            found = search.offer(schedule)
            if found is not None and found.simulation.peak_bytes <= budget_bytes:
                search.offer_improved(schedule)
        # What schedules of other budgets recompute makes the menu too long to solve: on U-Net at
        # 10 %, 32.5 % overhead instead of 29.6.
        search.menus.clear()
        for stage in (*CHEAP_STAGES, *(QUICK_STAGES if quick else STAGES)):
            if search.is_done or (search.is_close and stage not in CHEAP_STAGES):
                break
            if search.is_nested and search.best is not None:
                break
            stage(search)
        if search.best is not None:  # stages end as soon as it is near the bound: improve it once
            search.offer_improved(search.best[0])
    if search.time_is_up() and not quick:
        _fallback_after_time_limit(search, time_limit_s=time_limit_s)
    return search.proposal()


def _fallback_after_time_limit(search: Search, *, time_limit_s: float) -> None:
    """Offer one eviction, and a checkpoint per block, if there was no time for evictions.

    The time limit may end a search in its first stage, with no schedule or with one that loses
    much.
    """
    is_enough = search.best is not None and (search.work > 0 or search.gap <= OPTIMAL_GAP)
    if is_enough or math.isinf(search.lost_share):
        return
    fallback_s = FALLBACK_SHARE * time_limit_s
    deadline = Deadline.after(max(FALLBACK_S, fallback_s) if search.best is None else fallback_s)
    budget_bytes = search.budget_bytes
    evicted, _ = evict(search.folded, budget_bytes=budget_bytes, n_restarts=0, deadline=deadline)
    by_block = every_block(
        search.graph, budget_bytes=budget_bytes, time_limit_s=deadline.left_s, seed=0
    )
    for schedule in (evicted, by_block.schedule):
        if schedule is not None:
            search.fits(schedule)


def single_cut(search: Search) -> None:
    """Stage 1: prove the bound of the strongest cut, and offer its schedule."""
    search.binding = binding_cut(
        search.folded, budget_bytes=search.budget_bytes, deadline=search.deadline
    )
    search.prove(search.binding.lost_share)
    cuts = search.binding.cuts
    if not search.is_done and cuts is not None and cuts.kept is not None:
        search.offer_cuts(cuts.kept)


def anchored_cut(search: Search) -> None:
    """Stage 2: offer the schedules of the strongest cut with anchors."""
    if search.binding.ranked_positions:
        offer_anchored(search, base=search.binding.ranked_positions[0][0])


def other_methods(search: Search) -> None:
    """Stage 3: offer the schedules of other methods.

    They only simulate what may fit and beat the best schedule, which saves most of their time.
    """
    for method in OTHER_METHODS:
        proposal = method(
            search.graph,
            budget_bytes=search.budget_bytes,
            time_limit_s=search.deadline.left_s,
            seed=0,  # they have no randomness
            worth_between_s=search.still_worth_between_s,
        )
        if proposal.schedule is not None:
            search.offer(proposal.schedule, on_menu=False)


def eviction(search: Search) -> None:
    """Stage 4: evict with each patience while there is work left.

    If no schedule has been found, offer the one with the smallest peak that can be found.
    """
    _evict(search)
    if search.best is None:
        proven_bytes, _ = proven_least_budget_bytes(search.folded, deadline=search.deadline)
        schedule, _ = least_schedule(
            search.folded, proven_bytes=proven_bytes, deadline=search.deadline
        )
        search.offer(schedule)


def several_cuts(search: Search, **limits: int) -> None:
    """Stage 5, second part: offer the schedules of several cuts, and evict with their guide."""
    if search.binding.cuts is None:
        return
    search.guide = offer_several_cuts(search, search.binding.cuts, **limits)
    _evict(search)


def windows(search: Search) -> None:
    """Stage 5, first part: sharpen the bound if the best schedule is far from it."""
    if search.binding.ranked_positions and WIDE_GAP <= search.gap < math.inf:
        lost_share = lost_share_by_windows(
            search.folded,
            budget_bytes=search.budget_bytes,
            base=search.binding.ranked_positions[0][0],
            deadline=search.deadline,
        )
        search.prove(lost_share)


def exact_search(search: Search) -> None:
    """Stage 6: prove and offer a fastest schedule of a small graph, or what is proven in time."""
    if not (search.binding.ranked_positions and is_small(search.graph)):
        return
    baseline_s = search.graph.baseline_time_s or 1.0
    found = fastest_schedule(
        search.folded,
        budget_bytes=search.budget_bytes,
        worth_s=(search.best_share + TIME_ERROR) * baseline_s,
        deadline=search.deadline,
    )
    search.prove(found.proven_s / baseline_s - TIME_ERROR)
    if search.best is None and not found.is_complete:
        found = any_schedule(
            search.folded, budget_bytes=search.budget_bytes, deadline=search.deadline
        )
    if found.schedule is not None:
        search.offer_improved(found.schedule)


def recombination(search: Search) -> None:
    """Stage 7: recombine the schedules found so far."""
    if not search.binding.ranked_positions:
        return
    folded, base = search.folded, search.binding.ranked_positions[0][0]
    other_bytes = int(folded.held_bytes[base] + folded.own_bytes[base])
    for share in ROOM_SHARES:
        if search.is_done:
            break
        cuts = solve_cuts(
            folded,
            positions=[base],
            budget_bytes=other_bytes + int(share * (search.budget_bytes - other_bytes)),
            as_milp=True,
            node_limit=5,
            deadline=search.deadline,
        )
        if cuts.kept is None:
            break
        search.offer_cuts(cuts.kept)  # for the menu
    recombine(search, base=base)


def _evict(search: Search) -> None:
    """Offer the schedule of each patience, taken to its local optimum, while there is work left."""
    max_work = max(MAX_WORK, WORK_PER_NODE * len(search.graph.nodes))
    _evict_each(search, PATIENCE, max_work=max_work)
    if search.best is None:
        # Restarts only here: recomputing ahead of time costs more, and only lengthens the menu.
        max_work = search.work + MAX_LAST_WORK
        _evict_each(search, LEAST_PATIENCE, max_work=max_work, n_restarts=MAX_RESTARTS)


def _evict_each(
    search: Search, patiences: Iterable[float], *, max_work: int, n_restarts: int = 0
) -> None:
    for patience in patiences:
        if search.is_close or (search.work >= max_work and search.best is not None):
            continue
        schedule, work = evict(
            search.folded,
            budget_bytes=search.budget_bytes,
            guide=search.guide,
            patience=patience,
            n_restarts=n_restarts,
            deadline=search.deadline,
        )
        search.work += work
        if schedule is not None:
            search.work += 10 * len(schedule.order)
            search.offer_improved(schedule)


CHEAP_STAGES: tuple[Callable[[Search], None], ...] = (
    nested_reversals,
    single_cut,
    anchored_cut,
    other_methods,
)
"""Run until the gap is DONE_GAP."""
STAGES: tuple[Callable[[Search], None], ...] = (
    eviction,
    windows,
    several_cuts,
    exact_search,
    recombination,
)
"""Run until the gap is OPTIMAL_GAP."""
QUICK_STAGES: tuple[Callable[[Search], None], ...] = (
    _evict,
    partial(several_cuts, max_columns=1_500),
)
"""Run instead of STAGES if `quick`."""
