"""`auto`: whole models, operator by operator, in seconds, with a proof beside the answer.

1. **Bound.** `solver.bound.lower_bound.binding_cut` finds the moment whose cut loses the most
   recompute time. Its MILP gives the proven bound and a set S of storages to have on the device at
   that moment.
2. **Schedule.** `solver.methods.auto.from_cuts` keeps S there, recomputes the rest just in time,
   and the judge says what it really peaks at. The recompute time is the cut's own cost: if the
   schedule fits, the bound is met up to the MILP's gap, and the answer is optimal over everything
   the judge accepts.
3. **Anchors** where it overflows: `solver.methods.auto.anchored_cut` solves the cut again with the
   narrow tensors between segments held, so that less is recomputed at a time, and with fewer bytes.
4. **Eviction**: `solver.methods.evict` runs the step within the budget, dropping what is
   cheapest to lose; `solver.methods.auto.leaner` takes out recomputation for which there was
   room after all. The other methods are asked too, so `auto` is never worse than they are by more
   than DONE_GAP.
5. **Several cuts at once**: the moments that overflowed join, each with its row of bytes; the
   program is a relaxation, so its dual bound sharpens the proof, and its sets are replayed. A
   moment that overflows again gets an allowance for what the recomputation right before it takes;
   from then on the program is a heuristic and proves nothing. The eviction is repeated, dropping
   first what the cuts do not hold.
6. **Recombination**: whatever ran again in one of the schedules judged so far, fitting or not, goes
   on a menu, and `solver.methods.auto.recombine` finds the best schedule that can be put together
   from it. Evictions with random factors on their scores make the menu richer, and it is solved
   again. For a graph of some ten nodes the integer program of `solver.methods.ilp` does instead.

Rounding a relaxation and replaying it under the true memory rules is in the spirit of Jain et al.
2020 (Checkmate, section 5), the eviction in that of Kirisame et al. 2021 (DTR); the cuts and the
recombination are ours. Proven: the bound, always; optimality where the gap closes. Not proven: that
a schedule is found where one exists, and anything about a gap that is left, which may be the
bound's fault.

Work is limited by counts of moments, rounds, branch-and-bound nodes and evictions, so the same
input and seed give the same schedule whatever the machine's load; the clock ends the search only
as the last resort, and then the proposal says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from graphs.graph import Graph
from solver.bound import (
    Binding,
    Cuts,
    FoldedGraph,
    binding_cut,
    proven_least_budget_bytes,
    solve_cuts,
)
from solver.common import KEPT_SHARE, Deadline, OutOfTimeError
from solver.methods.auto.anchored_cut import offer_anchored
from solver.methods.auto.from_cuts import schedule_from_cuts
from solver.methods.auto.leaner import drop_recomputation
from solver.methods.auto.recombine import recombine
from solver.methods.auto.search import Search
from solver.methods.auto.several_cuts import offer_several_cuts
from solver.methods.dp import dp
from solver.methods.every_block import every_block
from solver.methods.evict import evict
from solver.methods.ilp import ilp
from solver.methods.ilp_stages import Stages, TooLargeError
from solver.methods.least_budget import PATIENCE, least_schedule
from solver.methods.proposal import InterruptedSearchError, Method, Proposal
from solver.methods.revolve import revolve
from solver.methods.sqrt import sqrt
from solver.schedule import Schedule

SMALL_VARIABLES = 500
"""Of an integer program that takes about a second."""
ROOM_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Of what the cut leaves for its set: the smaller sets show what else can run again, and where."""
MAX_WORK = 2_000_000
"""Of the evictions of one round: about three seconds."""
N_RECOMBINATIONS = 3
"""Rounds of evictions with random factors and recombination."""
MORE = 1.1
"""The menu must have grown by this factor to be worth another program."""
WIDE_GAP = 5e-3
"""Of the baseline's time: a gap beyond it is worth such a round."""

OTHERS: tuple[Method, ...] = (every_block, sqrt, revolve, dp)
"""`none` is tried first of all, `ilp` on small graphs."""

Guide = Mapping[int, frozenset[int]]


def auto(
    graph: Graph,
    *,
    budget_bytes: int,
    time_limit_s: float,
    seed: int,
    starts: Sequence[Schedule] = (),
) -> Proposal:
    """The best schedule found and the proven bound; see the module.

    starts: schedules known for this graph, such as those of a smaller budget.

    Ctrl-C raises InterruptedSearchError with what was best by then.
    """
    end = Deadline.after(time_limit_s)
    folded = FoldedGraph.of(graph)
    search = Search(folded, budget_bytes, end, kept_s=KEPT_SHARE * time_limit_s)
    try:
        _run(search, seed=seed, starts=starts)
    except OutOfTimeError:
        search.timed_out = True
    except KeyboardInterrupt as interrupt:
        search.timed_out = True
        raise InterruptedSearchError(search.proposal()) from interrupt
    return search.proposal()


def _run(search: Search, *, seed: int, starts: Sequence[Schedule]) -> None:
    """The steps of the module's docstring; `search` keeps what they find."""
    folded, budget_bytes, time_limit_s = search.folded, search.budget_bytes, search.left_s
    search.offer(schedule_from_cuts(folded, {}))
    for schedule in starts:
        _offer_improved(search, schedule)
    if search.done:
        return
    binding = binding_cut(folded, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
    search.lost_share = binding.lost_share
    search.cut_short = binding.timed_out
    if not search.done and binding.cuts is not None:
        _offer_cuts(search, binding.cuts)
    if not search.close and binding.ranked:
        offer_anchored(search, base=binding.ranked[0][0])
    if not search.done:
        _ask_others(search, seed=seed)
    if not search.close:
        _evict(search, {}, PATIENCE[0], None)
    if search.best is None and not search.done:
        _offer_least(search)
    if not search.close:
        _evict_all(search, {})
    guide: Guide = {}
    if not search.close and binding.cuts is not None:
        guide = offer_several_cuts(search, binding.cuts)
        if not search.close:
            _evict_all(search, guide)
    if not search.close and not _solve_small(search, seed=seed):
        _recombine_all(search, binding, guide, seed=seed)


def _offer_cuts(search: Search, cuts: Cuts) -> None:
    """Replay what the single cut keeps: where it fits, nothing else is needed."""
    if cuts.kept is not None:
        kept = dict(zip(cuts.positions, cuts.kept, strict=True))
        search.offer(schedule_from_cuts(search.folded, kept, deadline=search.deadline))


def _offer_improved(search: Search, schedule: Schedule) -> None:
    """Offer it, and where it fits what is left of it when there is room for more."""
    played = search.offer(schedule)
    if played is not None and played.simulation.peak_bytes <= search.budget_bytes:
        search.offer(_improved(search, schedule))


def _improved(search: Search, schedule: Schedule) -> Schedule:
    return drop_recomputation(
        search.folded, schedule, budget_bytes=search.budget_bytes, deadline=search.deadline
    )


def _evict_all(search: Search, guide: Guide) -> None:
    """Greedy eviction with each patience, while there is work left."""
    for patience in PATIENCE:
        if not search.done and (search.work < MAX_WORK or search.best is None):
            _evict(search, guide, patience, None)


def _evict(search: Search, guide: Guide, patience: float, weights: Sequence[float] | None) -> float:
    """Offer one eviction's schedule, taken to its local optimum; its seconds (inf: none)."""
    folded, budget_bytes = search.folded, search.budget_bytes
    evicted = evict(
        folded,
        budget_bytes=budget_bytes,
        guide=guide,
        patience=patience,
        weights=weights,
        deadline=search.deadline,
    )
    search.work += evicted.work
    if evicted.schedule is None:
        return math.inf
    search.work += 10 * len(evicted.schedule.order)
    played = search.offer(_improved(search, evicted.schedule))
    return math.inf if played is None else played.simulation.time_s


def _offer_least(search: Search) -> None:
    """Where nothing fits so far: the schedule of the least peak that is found."""
    deadline = search.deadline
    proven_bytes, _ = proven_least_budget_bytes(search.folded, deadline=deadline)
    schedule, _ = least_schedule(search.folded, proven_bytes=proven_bytes, deadline=deadline)
    search.offer(schedule)


def _solve_small(search: Search, *, seed: int) -> bool:
    """Whether the graph was small enough for the integer program, which then found the best."""
    if search.folded.n_nodes > 40:
        return False
    try:
        stages = Stages.of(search.folded, budget_bytes=search.budget_bytes, n_sweeps=1)
    except TooLargeError:
        return False
    if find_spec("pulp") is None:
        return False
    if stages.n_variables > SMALL_VARIABLES:
        return False
    proposal = ilp(
        search.folded.graph,
        budget_bytes=search.budget_bytes,
        time_limit_s=search.left_s,
        seed=seed,
    )
    if proposal.schedule is not None:
        search.offer(proposal.schedule)
    search.lost_share = max(
        search.lost_share,
        proposal.lower_bound_s / (search.folded.graph.baseline_time_s or 1.0) - 1.0,
    )
    return not proposal.timed_out


def _recombine_all(search: Search, binding: Binding, guide: Guide, *, seed: int) -> None:
    """The module's step 6: put on the menu, solve it, put more on it by random evictions."""
    if not binding.ranked:
        return
    base = binding.ranked[0][0]
    _fill_menu(search, base)
    recombine(search, base=base)
    rng = random.Random(seed)
    for _ in range(N_RECOMBINATIONS):
        before, n_before = search.gap, len(search.reruns)
        if search.done or before <= WIDE_GAP:
            return
        _search_weights(search, guide, rng)
        if search.gap == before and len(search.reruns) < MORE * n_before:
            return
        recombine(search, base=base)
        if search.gap > 0.99 * before:
            return


def _fill_menu(search: Search, base: int) -> None:
    """Replay the single cut's sets for less and less room."""
    folded = search.folded
    rest = int(folded.held_bytes[base] + folded.own_bytes[base])
    for share in ROOM_SHARES:
        if search.done:
            return
        cuts = solve_cuts(
            folded,
            positions=[base],
            budget_bytes=rest + int(share * (search.budget_bytes - rest)),
            whole=True,
            node_limit=5,
            deadline=search.deadline,
        )
        if cuts.kept is None:
            return
        search.offer(schedule_from_cuts(folded, {base: cuts.kept[0]}, deadline=search.deadline))


def _search_weights(search: Search, guide: Guide, rng: random.Random) -> None:
    """Change the factors of a few units at random, keep what is no worse."""
    n_units = search.folded.n_units
    patience = rng.choice(PATIENCE)
    best = [1.0] * n_units
    best_s = _evict(search, guide, patience, best)
    limit = search.work + MAX_WORK
    while search.work < limit and not search.close:
        share = rng.choice((0.02, 0.1, 0.4))
        weights = [w * math.exp(rng.gauss(0.0, 1.0)) if rng.random() < share else w for w in best]
        time_s = _evict(search, guide, patience, weights)
        if time_s <= best_s:
            best, best_s = weights, time_s


def _ask_others(search: Search, *, seed: int) -> None:
    """Take another method's schedule where it is better."""
    for method in OTHERS:
        if search.done:
            return
        proposal = method(
            search.folded.graph,
            budget_bytes=search.budget_bytes,
            time_limit_s=search.left_s,
            seed=seed,
        )
        if proposal.schedule is not None:
            search.offer(proposal.schedule, on_menu=False)
