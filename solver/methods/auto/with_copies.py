"""Keep, recompute or copy to host or disk: one choice, from the cut with copies.

1. **The baseline with copies** of what exceeds the budget is cheap, and tried first.
2. `solver.bound.binding_copy_cut` finds the position at which the most time is lost, and the bound.
3. **The cut's choice.** Its program, with recomputation counted where it is needed
   (`just_in_time`), says what is on the device at the position, what is on the host and what is
   recomputed. Recomputation is written out as an order (`from_cuts`), and copies are placed in it
   (`copy_placement`). If the simulator's peak is above the budget, the cut gets fewer bytes; if the
   compute stream waits for a copy, that storage may not be away; then the program is solved again.
   What exceeds the budget at other positions is copied too. The same is done to plans that only
   recompute, made for larger budgets.
4. **Recomputation around the copies** (`around_copies`): the whole search for the device alone, on
   a step in which what the cut fetches comes back by nodes that cost next to nothing.
5. **Local search** (`copies_local_optimum`): starting from the best of these, and of the plans for
   larger budgets, a recomputation is removed or replaces a copy, while that makes the step faster.
6. **Recomputation alone** (`stages`): its schedule is a candidate like the others. It is skipped if
   its own bound is no better than what has been found. If it is the best, local search replaces its
   recomputations by copies. A part of the time limit is kept for it; if that is short for the step,
   it comes first.

The bound is that of the cuts with copies, so it holds for every schedule, whatever it copies. A
best schedule without copies that meets it proves that the host does not help.

**With a disk** the host alone is planned for first, in half of the time. If the host has room for
everything, so that a disk cannot help, it gets all of the time. If the bound leaves something to
gain, the stages run again: what the host has no room for goes on to the disk, what is away longest
first (`copy_placement_state.goes_to_disk`).

Work is limited by counts. Where the copies are few and large, the choice is a knapsack with
deadlines, and a gap is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from graphs.graph import Graph
from solver.bound import StorageGraph, binding_copy_cut, binding_cut, least_time_s
from solver.methods.auto.around_copies import recompute_around
from solver.methods.auto.copies_local_optimum import Attempt, climb
from solver.methods.auto.copy_placement import Gap, find_gaps, never_copied
from solver.methods.auto.copy_search import CopySearch
from solver.methods.auto.runs import live_bytes
from solver.methods.auto.search import DONE_GAP
from solver.methods.proposal import Proposal
from solver.schedule import (
    OPTIMAL_GAP,
    IllegalScheduleError,
    Places,
    Schedule,
    Spill,
    baseline,
    free_after_last_use,
    simulate,
)

GAP = 3e-4
"""A program is solved to within this share of the baseline's time."""
SIMILAR_SHARE = 0.9
"""A position whose bound is below this share of the strongest cut's is skipped."""
MAX_ROUNDS = 6
"""Maximum times that the cut of one position is solved."""
ROUND_NODES, PROOF_NODES = 20, 50
"""Maximum branch-and-bound nodes of one program: in a round, and for the proof."""
LOCAL_SEARCH_GAP = 3e-3
"""With a gap below this share of the baseline's time, plans for larger budgets and local search
have gained nothing on the graphs of `benchmarks.offload`, in seconds.
"""
MAX_LOCAL_SEARCH_WORK = 60_000
"""Limit on the nodes in all orders that local search tries."""
BUDGET_RAISES = (1.0, 0.7, 0.4)
"""By how much budgets for recomputation alone are raised, as shares of the bytes that the cut has
on the host.
"""
HOPELESS_GAP = 1.0
"""From this gap on, a share of the baseline's time, recomputation alone is faster."""
COPY_STAGES_SHARE = 0.6
"""Maximum share of the time limit before recomputation alone is searched for, so that the result is
not worse than that even if the time limit ends the search. On a step of 82 nodes with 64 KB of a
host, plans for larger budgets took all of the time: 59.8 % instead of 37.1.
"""
NODES_PER_S = 50
"""Nodes per second for which the rest of the time is enough to search for recomputation alone; a
larger step begins with it. A ResNet of 1111 operators at 15 % of its activations was planned with
+110 % beside a host in 20 s, and with +34 % without one: the time left at the end was too short for
it.
"""

Stage = Callable[[CopySearch], None]


def recompute_and_copy(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    places: Places,
    starts: Sequence[Schedule] = (),
    quick: bool = False,
) -> Proposal:
    """The best schedule found, with copies or without, and the proven bound.

    starts: known schedules of this graph.
    quick: only what takes seconds.
    """
    search = CopySearch(
        graph,
        budget_bytes=budget_bytes,
        time_limit_s=time_limit_s,
        places=places,
        starts=starts,
        quick=quick,
    )
    plan_for_host_only = partial(
        recompute_and_copy,
        graph,
        budget_bytes=budget_bytes,
        places=Places(host=places.host),
        starts=[s for s in starts if not any(isinstance(op, Spill) for op in s.ops)],
        quick=quick,
    )
    with search:
        for schedule in (baseline(graph), *starts):
            search.offer(schedule)
        if places.disk is not None and sum(search.offloadable.unit_bytes) <= places.host_bytes:
            found = plan_for_host_only(time_limit_s=search.deadline.left_s)
            search.offer_proposal(found)  # a disk only frees host memory: there is room for all
            best = search.best[0] if search.best else None
            return dataclasses.replace(found, schedule=best)
        if places.disk is not None:
            search.offer_proposal(plan_for_host_only(time_limit_s=search.deadline.left_s / 2))
        if not search.is_done:
            # Before the bound, so that there is a schedule whenever the time limit is reached.
            search.offer(_copy_overflow(search, baseline(graph).order))
        search.binding = binding_copy_cut(
            search.offloadable, budget_bytes=budget_bytes, places=places, deadline=search.deadline
        )
        search.lost_share = search.binding.lost_share
    if places.disk is not None:
        _run_stages(search, COPY_STAGES)
    else:
        # By the time limit, not the time that is left: the same order on a busy machine too.
        is_large = len(graph.nodes) > NODES_PER_S * (1 - COPY_STAGES_SHARE) * time_limit_s
        with search.with_time_share(COPY_STAGES_SHARE):
            _run_stages(search, RECOMPUTE_STAGES if is_large else COPY_STAGES)
        _run_stages(search, COPY_STAGES if is_large else RECOMPUTE_STAGES)
    return Proposal(
        schedule=search.best[0] if search.best else None,
        lower_bound_s=least_time_s(graph, lost_share=search.lost_share),
        timed_out=search.timed_out or (search.cut_short and search.gap > DONE_GAP),
    )


def _run_stages(search: CopySearch, stages: Sequence[Stage]) -> None:
    """Run the stages until the search is done."""
    with search:
        for stage in stages:
            may_skip = search.quick and stage in SLOW_STAGES and search.best is not None
            if search.is_done or math.isinf(search.lost_share) or may_skip:
                return
            stage(search)


def _try_strongest_cut(search: CopySearch) -> None:
    """Offer the schedules of the strongest cut."""
    for cut in search.binding.ranked_cuts[:1]:
        _solve_cut_repeatedly(search, cut.position)


def _try_second_cut(search: CopySearch) -> None:
    """Offer the schedules of the second strongest cut, if it is about as strong."""
    for cut in search.binding.ranked_cuts[1:2]:
        if cut.lost_share >= SIMILAR_SHARE * search.binding.lost_share and search.gap > OPTIMAL_GAP:
            _solve_cut_repeatedly(search, cut.position)


def _solve_cut_repeatedly(search: CopySearch, position: int) -> None:
    """Offer the schedule of the cut at a position, and solve the cut again while that may help.

    Each round takes away the bytes above the budget, and bars the storage that is waited for most.
    """
    less_bytes, barred = 0, set(never_copied(search.folded))
    for n_before in range(MAX_ROUNDS):
        if search.is_done or (n_before and search.gap <= OPTIMAL_GAP):
            return
        program = search.program_at(position, allowance_bytes=less_bytes)
        program.forbid_fetches(barred)
        cut = program.solve_near_lp(
            gap=GAP,
            node_limit=search.node_limit_for(program, ROUND_NODES),
            deadline=search.deadline,
        )
        if cut.kept is None or cut.fetched is None:
            return
        order, gaps = search.order_and_gaps_of_cut(cut.position, kept=cut.kept, fetched=cut.fetched)
        placed = search.place(order, gaps)
        found = search.offer(placed.schedule)
        if found is None:
            return
        over_bytes = found.peak_bytes - search.budget_bytes
        if over_bytes > 0:
            search.offer(_copy_overflow(search, order, gaps))
        # Next round: fewer bytes, and no fetch of the unit for which the stream waits most.
        longest_waiting = max(placed.waits_s, key=lambda u: (placed.waits_s[u], u), default=None)
        if over_bytes <= 0 and longest_waiting is None:
            return
        less_bytes += max(0, over_bytes)
        if longest_waiting is not None:
            barred.add(longest_waiting)


def _sharpen_bound(search: CopySearch) -> None:
    """Sharpen the bound: solve the strongest cut as an integer program."""
    for cut in search.binding.ranked_cuts[:1]:
        program = search.program_at(cut.position)
        found = program.solve(
            as_milp=True,
            gap=GAP,
            node_limit=search.node_limit_for(program, PROOF_NODES),
            deadline=search.deadline,
        )
        search.lost_share = max(search.lost_share, found.lost_share)


def _search_without_copies(search: CopySearch) -> None:
    """Recompute only, unless a bound shows that no schedule without copies beats what was found."""
    if search.gap < HOPELESS_GAP:
        lost_without_copies = binding_cut(
            search.folded, budget_bytes=search.budget_bytes, deadline=search.deadline
        ).lost_share
        if lost_without_copies - search.lost_share >= search.gap:
            return
    proposal = search.recompute_only(search.budget_bytes, quick=search.quick)
    search.offer_proposal(proposal)
    search.climb_starts += [proposal.schedule] if proposal.schedule is not None else []


def _plan_for_larger_budgets(search: CopySearch) -> None:
    """Make plans for larger budgets, and copy what exceeds the real one."""
    if search.gap <= LOCAL_SEARCH_GAP:
        return
    orders = []
    strongest = search.binding.ranked_cuts[:1]
    fetched_bytes = sum(search.folded.unit_bytes[u] for cut in strongest for u in cut.fetched or ())
    for share in BUDGET_RAISES:
        if fetched_bytes and not search.time_is_up():
            budget_bytes = search.budget_bytes + int(share * fetched_bytes)
            schedule = search.recompute_only(budget_bytes, quick=True).schedule
            orders += [] if schedule is None else [schedule.order]
    fitting: list[tuple[float, Schedule]] = []
    for order in dict.fromkeys(orders):
        if search.is_done:
            return
        schedule = _copy_overflow(search, order)
        found = search.offer(schedule)
        if found is not None and found.peak_bytes <= search.budget_bytes:
            fitting.append((found.time_s, schedule))
    search.climb_starts += [min(fitting, key=itemgetter(0))[1]] if fitting else []


def _search_locally(search: CopySearch) -> None:
    """Search locally from the best schedule, unless done before, and from the `climb_starts`."""
    starts, search.climb_starts = search.climb_starts, []
    if search.best is not None and search.best[0] is not search.climb_end:
        starts.insert(0, search.best[0])
    for order in dict.fromkeys(schedule.order for schedule in starts):
        if search.is_done or search.gap <= LOCAL_SEARCH_GAP:
            return
        start = _attempt_order(search, order)
        if start is not None:
            climb(
                search.folded,
                partial(_attempt_order, search),
                start,
                max_work=MAX_LOCAL_SEARCH_WORK,
            )
    search.climb_end = search.best[0] if search.best else None


def _attempt_order(search: CopySearch, order: Sequence[str]) -> Attempt | None:
    """The order with what exceeds the budget on the host.

    Returns None if it is illegal (for example, an alias would outlive what is recomputed), does not
    fit, or the time is up.
    """
    if search.time_is_up():
        return None
    try:
        gaps = gaps_to_offload(search.folded, order, search.budget_bytes)
    except IllegalScheduleError:
        return None
    placed = search.place(order, gaps)
    found = search.offer(placed.schedule)
    if found is None or found.peak_bytes > search.budget_bytes:
        return None
    return Attempt(order, gaps, placed.waits_s, found.time_s)


def _copy_overflow(search: CopySearch, order: Sequence[str], gaps: Sequence[Gap] = ()) -> Schedule:
    """The order with these copies, and copies of what still exceeds the budget."""
    more = gaps_to_offload(search.folded, order, search.budget_bytes, offloaded=gaps)
    return search.place(order, [*gaps, *more]).schedule


def gaps_to_offload(
    folded: StorageGraph, order: Sequence[str], budget_bytes: int, *, offloaded: Sequence[Gap] = ()
) -> list[Gap]:
    """Gaps to spend on the host so that the order fits, the longest first.

    If it cannot fit, all gaps that help.
    offloaded: gaps that are spent on the host already.
    """
    plain = free_after_last_use(folded.graph, order)
    live = live_bytes(plain, simulate(folded.graph, plain))
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


COPY_STAGES: tuple[Stage, ...] = (
    _try_strongest_cut,
    _sharpen_bound,
    recompute_around,
    _try_second_cut,
    _plan_for_larger_budgets,
    _search_locally,
)
RECOMPUTE_STAGES: tuple[Stage, ...] = (_search_without_copies, _search_locally)
SLOW_STAGES = (recompute_around, _plan_for_larger_budgets, _search_locally)
