"""`auto`: whole models, operator by operator, in seconds, with a proof beside the answer.

1. **Bound.** `solver.bounds.binding_cut` finds the moment whose cut loses the most recompute time.
   Its MILP gives the proven bound and a set S of storages to have on the device at that moment.
2. **Schedule.** `solver.replay` keeps S there, recomputes the rest just in time, and the judge says
   what it really peaks at. The recompute time is the cut's own cost: if the schedule fits, the
   bound is met up to the MILP's gap, and the answer is optimal over everything the judge accepts.
3. **Eviction** where it overflows: `solver.evict` runs the step within the budget, dropping what S
   does not hold first and then what is cheapest to lose; `solver.improve` takes out recomputation
   for which there was room after all.
4. **Several cuts at once**: the moments that overflowed join, each with its row of bytes; the
   program is a relaxation, so its dual bound sharpens the proof, and its sets are replayed and
   guide the eviction. A moment that overflows again gets an allowance for what the recomputation
   right before it takes; from then on the program is a heuristic and proves nothing.
5. **Search** over the eviction's scores, by repeatable random factors, where a gap is left; for a
   graph of some ten nodes the integer program of `solver.ilp` instead.
6. **The other methods** are asked last, so `auto` is never worse than they are by more than GAP.

Rounding a relaxation and replaying it under the true memory rules is in the spirit of Jain et al.
2020 (Checkmate, section 5), the eviction in that of Kirisame et al. 2021 (DTR); the cuts are ours.
Proven: the bound, always; optimality where the gap closes. Not proven: that a schedule is found
where one exists, and anything about a gap that is left, which may be the bound's fault.

Work is limited by counts of moments, rounds, branch-and-bound nodes and evictions, so the same
input and seed give the same schedule whatever the machine's load; the clock ends the search only
as the last resort, and then the proposal says so.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphs.graph import Graph
from solver.bounds import GAP, binding_cut
from solver.cut import CutProgram, Cuts, solve_cuts
from solver.evict import evict
from solver.ilp import ilp
from solver.improve import improve
from solver.proposal import InterruptedSearchError, Proposal
from solver.replay import Played, play, replay
from solver.schedule import Schedule
from solver.simulate import IllegalScheduleError
from solver.solution import OPTIMAL_GAP
from solver.stages import Stages, TooLargeError
from solver.step import Step

MAX_ROUNDS = 5
"""Times that the overflowing moments are added to the cuts."""
N_NEW_MOMENTS = 3
"""Moments that one round adds at most."""
MAX_MOMENTS = 4
MAX_COLUMNS_OF_FEW = 4000
"""Of a program with at most that many cuts."""
MAX_COLUMNS = 800
"""Of a program with more cuts: beyond it even the first node takes many seconds."""
NODE_LIMIT = 5
"""Branch-and-bound nodes for several cuts."""
SMALL_VARIABLES = 500
"""Of an integer program that takes about a second."""
PATIENCE = (1.0, 0.5, 2.0)
"""Exponents of the distance to the next use that the eviction tries."""
MAX_WORK = 2_000_000
"""Of the evictions, and once more of the search over weights: about three seconds each."""


@dataclass
class Search:
    """The best schedule and the best bound so far, for one graph and one budget.

    work: of the evictions so far, as `Evicted` counts it. guide, patience: of the eviction that
    gave the best.
    """

    step: Step
    budget_bytes: int
    deadline_s: float
    best: Played | None = None
    lost_share: float = 0.0
    timed_out: bool = False
    work: int = 0
    guide: Mapping[int, frozenset[int]] | None = None
    patience: float = 1.0

    def offer(self, schedule: Schedule) -> Played | None:
        """Judge it; keep it if it fits and is faster than the best. None: not legal."""
        try:
            played = play(self.step, schedule)
        except IllegalScheduleError:
            return None
        if played.trace.peak_bytes <= self.budget_bytes and (
            self.best is None or played.trace.time_s < self.best.trace.time_s
        ):
            self.best = played
        return played

    @property
    def gap(self) -> float:
        """What is left between the best schedule and the bound, as a share of the baseline."""
        if self.best is None:
            return math.inf
        baseline_s = self.step.graph.baseline_time_s
        lost_s = self.best.trace.time_s - baseline_s
        return (lost_s / baseline_s if baseline_s else 0.0) - self.lost_share

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    @property
    def done(self) -> bool:
        if self.left_s <= 0:
            self.timed_out = True
        return self.timed_out or self.gap <= GAP or math.isinf(self.lost_share)

    @property
    def close(self) -> bool:
        """Whether more search is not worth its time: optimal as `Solution` says it, or done."""
        return self.done or self.gap <= OPTIMAL_GAP

    def proposal(self) -> Proposal:
        baseline_s = self.step.graph.baseline_time_s
        return Proposal(
            schedule=self.best.schedule if self.best else None,
            lower_bound_s=baseline_s * (1.0 + self.lost_share),
            timed_out=self.timed_out,
        )


def auto(graph: Graph, *, budget_bytes: int, time_limit_s: float, seed: int) -> Proposal:
    """The best schedule found and the proven bound; see the module.

    Ctrl-C raises InterruptedSearchError with what was best by then.
    """
    step = Step.of(graph)
    search = Search(step, budget_bytes, time.monotonic() + time_limit_s)
    try:
        _run(search, seed=seed)
    except KeyboardInterrupt as interrupt:
        search.timed_out = True
        raise InterruptedSearchError(search.proposal()) from interrupt
    return search.proposal()


def _run(search: Search, *, seed: int) -> None:
    """The steps of the module's docstring; `search` keeps what they find."""
    step, budget_bytes, time_limit_s = search.step, search.budget_bytes, search.left_s
    search.offer(replay(step, {}))
    if search.done:
        return
    binding = binding_cut(step, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
    search.lost_share = binding.lost_share
    search.timed_out = binding.timed_out
    if not search.done and binding.cuts is not None:
        _refine(search, binding.cuts)
    if not search.done:
        _evict_all(search, None)
    if not search.done and not _solve_small(search, seed=seed) and not search.close:
        _search_weights(search, seed=seed)
    if not search.done:
        _ask_others(search, seed=seed)


def _refine(search: Search, cuts: Cuts) -> None:
    """Replay the cuts; where the schedule overflows, cut there too: the module's steps 2 to 4."""
    allowance_bytes = dict.fromkeys(cuts.positions, 0)
    for _ in range(MAX_ROUNDS):
        if cuts.kept is None:
            return
        guide = dict(zip(cuts.positions, cuts.kept, strict=True))
        played = search.offer(replay(search.step, guide))
        if played is None or search.done:
            return
        over = _overflowing(played, search.budget_bytes)
        if over:
            _evict_all(search, guide)
        if not over or search.close:
            return
        for p in over:
            if p in allowance_bytes:
                allowance_bytes[p] += played.stage_bytes[p] - search.budget_bytes
            else:
                allowance_bytes[p] = 0
        program = CutProgram(
            search.step, positions=sorted(allowance_bytes), budget_bytes=search.budget_bytes
        )
        few = len(allowance_bytes) <= MAX_MOMENTS and program.n_columns <= MAX_COLUMNS_OF_FEW
        if not few and program.n_columns > MAX_COLUMNS:
            return
        cuts = _solve(search, allowance_bytes)


def _solve(search: Search, allowance_bytes: Mapping[int, int]) -> Cuts:
    """The program of these cuts; without allowances its bound is a proof."""
    cuts = solve_cuts(
        search.step,
        positions=sorted(allowance_bytes),
        budget_bytes=search.budget_bytes,
        whole=True,
        allowance_bytes=allowance_bytes,
        gap=OPTIMAL_GAP,
        node_limit=NODE_LIMIT,
        time_limit_s=search.left_s,
    )
    if not any(allowance_bytes.values()):
        search.lost_share = max(search.lost_share, cuts.lost_share)
    search.timed_out = search.timed_out or cuts.timed_out
    return cuts


def _overflowing(played: Played, budget_bytes: int) -> list[int]:
    """The moments furthest above the budget, not too close to each other."""
    stage = played.stage_bytes
    over = [p for p, live_bytes in enumerate(stage) if live_bytes > budget_bytes]
    chosen: list[int] = []
    for p in sorted(over, key=lambda p: (-stage[p], p)):
        if len(chosen) < N_NEW_MOMENTS and all(abs(p - q) > 5 for q in chosen):
            chosen.append(p)
    return chosen


def _evict_all(search: Search, guide: Mapping[int, frozenset[int]] | None) -> None:
    """Greedy eviction with each patience, each taken to its local optimum."""
    for patience in PATIENCE:
        if not search.done and (search.work < MAX_WORK or search.best is None):
            _evict(search, guide, patience, None)


def _evict(
    search: Search,
    guide: Mapping[int, frozenset[int]] | None,
    patience: float,
    weights: Sequence[float] | None,
) -> float:
    """Offer one eviction's schedule; its seconds (inf: none)."""
    step, budget_bytes = search.step, search.budget_bytes
    evicted = evict(
        step, budget_bytes=budget_bytes, guide=guide, patience=patience, weights=weights
    )
    search.work += evicted.work
    if evicted.schedule is None:
        return math.inf
    search.work += 10 * len(evicted.schedule.order)
    played = search.offer(improve(step, evicted.schedule, budget_bytes=budget_bytes))
    if played is None:
        return math.inf
    if search.best is played:
        search.guide, search.patience = guide, patience
    return played.trace.time_s


def _solve_small(search: Search, *, seed: int) -> bool:
    """Whether the graph was small enough for the integer program, which then found the best."""
    if search.step.n_nodes > 40:
        return False
    try:
        stages = Stages.of(search.step, budget_bytes=search.budget_bytes, n_sweeps=1)
    except TooLargeError:
        return False
    if stages.n_variables > SMALL_VARIABLES:
        return False
    proposal = ilp(
        search.step.graph,
        budget_bytes=search.budget_bytes,
        time_limit_s=max(search.left_s, 0.1),
        seed=seed,
    )
    if proposal.schedule is not None:
        search.offer(proposal.schedule)
    search.lost_share = max(
        search.lost_share, proposal.lower_bound_s / (search.step.graph.baseline_time_s or 1.0) - 1.0
    )
    return not proposal.timed_out


def _search_weights(search: Search, *, seed: int) -> None:
    """Change the factors of a few units at random, keep what is no worse: step 5."""
    rng = random.Random(seed)
    n_units = search.step.n_units
    best = [1.0] * n_units
    best_s = _evict(search, search.guide, search.patience, best)
    limit = search.work + MAX_WORK
    while search.work < limit and not search.close:
        share = rng.choice((0.02, 0.1, 0.4))
        weights = [w * math.exp(rng.gauss(0.0, 1.0)) if rng.random() < share else w for w in best]
        time_s = _evict(search, search.guide, search.patience, weights)
        if time_s <= best_s:
            best, best_s = weights, time_s


def _ask_others(search: Search, *, seed: int) -> None:
    """Take another method's schedule where it is better."""
    from solver.methods import METHODS

    for name, method in METHODS.items():
        if name in ("auto", "none", "ilp") or search.done:
            continue
        proposal = method(
            search.step.graph,
            budget_bytes=search.budget_bytes,
            time_limit_s=search.left_s,
            seed=seed,
        )
        if proposal.schedule is not None:
            search.offer(proposal.schedule)
