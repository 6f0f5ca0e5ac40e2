"""`auto`: whole models, operator by operator, in seconds, with a proof beside the answer.

1. **Bound.** `solver.bounds.binding_cut` finds the moment whose cut loses the most recompute time.
   Its MILP gives the proven bound and a set S of storages to have on the device at that moment.
2. **Schedule.** `solver.replay` keeps S there, recomputes the rest just in time, and the judge says
   what it really peaks at. The recompute time is the cut's own cost: if the schedule fits, the
   bound is met up to the MILP's gap, and the answer is optimal over everything the judge accepts.
3. **Several cuts at once** where it overflows somewhere else: the overflowing moments join, each
   with its row of bytes and with an allowance for what the recomputation right before it takes;
   solve again, replay again. The same program without allowances is a relaxation, so its dual
   bound sharpens the proof.
4. **The other methods** are asked where a gap is left, so `auto` is never worse than they are by
   more than the gap that it reports.

The idea of rounding a relaxation and replaying it under the true memory rules is that of Jain et
al. 2020 (Checkmate, section 5) and of Beaumont et al. (rotor: persistent schedules); the cuts are
ours. Proven: the bound, always; optimality where the gap closes. Not proven: that a schedule is
found where one exists, and anything about a gap that is left, which may be the bound's fault.

Work is limited by counts of moments, rounds and branch-and-bound nodes, so the same input gives the
same schedule whatever the machine's load; the clock ends the search only as the last resort, and
then the proposal says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphs.graph import Graph
from solver.bounds import GAP, binding_cut
from solver.cut import Cuts, solve_cuts
from solver.proposal import InterruptedSearchError, Proposal
from solver.replay import Played, play, replay
from solver.schedule import Schedule
from solver.simulate import IllegalScheduleError
from solver.step import Step

MAX_ROUNDS = 12
"""Times that the overflowing moments are added to the cuts."""
N_NEW_MOMENTS = 4
"""Moments that one round adds at most."""
MAX_COLUMNS = 6000
"""Of a program with several cuts: beyond it the LP alone is slow."""


@dataclass
class Search:
    """The best schedule and the best bound so far, for one graph and one budget."""

    step: Step
    budget_bytes: int
    deadline_s: float
    best: Played | None = None
    lost_share: float = 0.0
    timed_out: bool = False
    tried: set[str] = field(default_factory=set)

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
    binding = binding_cut(step, budget_bytes=budget_bytes, time_limit_s=time_limit_s)
    search.lost_share = binding.lost_share
    search.timed_out = binding.timed_out
    if not search.done and binding.cuts is not None:
        _refine(search, binding.cuts)
    if not search.done:
        _ask_others(search, seed=seed)


def _refine(search: Search, cuts: Cuts) -> None:
    """Replay the cuts; where the schedule overflows, cut there too; see the module, step 3."""
    allowance_bytes = dict.fromkeys(cuts.positions, 0)
    for _ in range(MAX_ROUNDS):
        if cuts.kept is None:
            return
        played = search.offer(
            replay(search.step, dict(zip(cuts.positions, cuts.kept, strict=True)))
        )
        if played is None or search.done:
            return
        over = _overflowing(played, search.budget_bytes)
        if not over:
            return
        for p in over:
            if p in allowance_bytes:
                allowance_bytes[p] += played.stage_bytes[p] - search.budget_bytes
            else:
                allowance_bytes[p] = played.stage_bytes[p] - played.own_bytes[p]
        if len(allowance_bytes) * search.step.n_forward * 2 > MAX_COLUMNS:
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
        node_limit=100,
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
