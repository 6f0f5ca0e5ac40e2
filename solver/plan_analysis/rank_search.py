"""Find the fastest plans of a rank's stages that fit its budget together, by branch and bound.

The main decision is how many bytes each stage saves for backward per micro-batch, since they are
held for all micro-batches in flight, whichever stage runs. A *box* fixes one variant of each stage,
and limits for the bytes that each saves. If a stage saves at most what its box allows, while the
others hold at least their lower limits, its step is one that any method can plan: a span graph
(`solver.bound.in_flight`). The bounds of these plans add up to one bound of the box; the cuts of
all stages together give another (`solver.bound.rank_cuts`). The solution of the cuts also says how
much each stage should save, and the stages are then planned for that.

The search takes the box with the least bound, replays the solution of its cuts as schedules, plans
its stages, and halves it. If a replay overflows, the position at which it does is added to the
cuts, up to N_CUT_POSITIONS positions of a stage; then the replays mostly meet the bound. The search
ends when no box has a bound more than GAP below the best plans, or when N_BOXES have been planned.

Optimal within GAP if the method is optimal (`ilp`) and the search is not ended early. It falls
short if the method finds no plan in the bytes that the other stages leave. Cost: a few MILPs for
each box and, for boxes that they do not close, one run of the method for each stage.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphs.graph import Graph
from graphs.pipeline import Pipeline
from solver.bound import RankCuts, Span, StorageGraph, one_in_flight, span_graph, without_span_nodes
from solver.methods import METHODS, fold_simulation, schedule_from_cuts
from solver.plan_analysis.planned_stages import optimizer_s
from solver.plan_analysis.rank_peak import StageBytes, held_in_flight, peak_of, resident_bytes
from solver.schedule import IllegalScheduleError, Schedule, Simulation, Solution, baseline, simulate
from solver.sizes_deadlines_progress import Deadline, OutOfTimeError

GAP = 5e-4
"""Gap at which the search ends, as a share of the time of all stages without recomputation."""
N_BOXES = 16
"""How many boxes are planned at most."""
N_CUT_POSITIONS = 4
"""How many positions of a stage the cuts have at most, besides FORWARD_END."""

Saved = tuple[int, ...]
"""Bytes that each stage saves for backward per micro-batch."""


@dataclass(frozen=True)
class StagePlan:
    """A plan of one stage.

    time_s: seconds of one micro-batch, without the optimizer.
    bytes_used: the bytes that the stage takes with this plan.
    """

    graph: Graph
    schedule: Schedule
    simulation: Simulation
    time_s: float
    bytes_used: StageBytes

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> StagePlan:
        found = simulate(graph, schedule)
        time_s = found.time_s - optimizer_s(graph)
        return cls(graph, schedule, found, time_s, StageBytes.of(graph, schedule, found))


class Stage:
    """A stage of the rank, with its known plans and bounds.

    plain: for each variant, the plan that recomputes nothing.
    plans: all known plans, the fastest first; they need not fit.
    """

    def __init__(self, given: Solution, others: Sequence[tuple[int, ...]]) -> None:
        """others: for each of its passes, how many others of each stage are in flight."""
        self._request, self._others = given.request, others
        self.plain = [StagePlan.of(graph, baseline(graph)) for graph in given.step.planned]
        self.plans = list(self.plain)
        known = given.schedule or (given.obstacle and given.obstacle.schedule)
        if known:
            self.plans.append(StagePlan.of(given.graph, known))
        self.plans.sort(key=lambda plan: plan.time_s)
        self._proven_s: dict[tuple[int, int, int], float] = {}

    def others_bytes(self, saved_bytes: Saved) -> int:
        """The most bytes that other micro-batches hold during a pass of this stage."""
        return max(held_in_flight(others, saved_bytes) for others in self._others)

    def n_in_flight(self, stage: int) -> int:
        """The most micro-batches of stage `stage` in flight during a pass of this one."""
        return max(others[stage] for others in self._others)

    def bound_s(self, variant: int, most_bytes: int, others_bytes: int) -> float:
        """The best known bound on plans of this variant under these limits (see `plan`)."""
        proven = (
            bound_s
            for (planned, most, others), bound_s in self._proven_s.items()
            if planned == variant and most >= most_bytes and others <= others_bytes
        )
        return max(proven, default=self.plain[variant].time_s)

    def plan(
        self, variant: int, most_bytes: int, others_bytes: int, *, room_bytes: int, left_s: float
    ) -> bool:
        """Plan the stage to save at most `most_bytes`, while the others hold `others_bytes`; note
        plan and bound. Returns whether the time limit ended the search.

        room_bytes: bytes that all stages have beyond their resident tensors.
        """
        key, graph = (variant, most_bytes, others_bytes), self.plain[variant].graph
        if key in self._proven_s:
            return False
        budget_bytes, span = graph.resident_bytes + room_bytes, Span(0.0, 0, most_bytes)
        proposal = METHODS[self._request.method](
            span_graph(graph, span, budget_bytes=budget_bytes, others_bytes=others_bytes),
            budget_bytes=budget_bytes,
            time_limit_s=left_s,
            seed=self._request.seed,
        )
        proven_s = proposal.lower_bound_s - optimizer_s(graph)
        self._proven_s[key] = max(self.plain[variant].time_s, proven_s)
        if proposal.schedule is not None:
            self._add_plan(StagePlan.of(graph, without_span_nodes(graph, proposal.schedule)))
        return proposal.timed_out

    def replay(
        self, variant: int, kept: Mapping[int, Collection[int]], *, room_bytes: int
    ) -> tuple[StageBytes, int] | None:
        """Turn a solution of the cuts into a plan, and note it. Returns what the plan takes, and
        the position at which it holds the most (None: it is illegal).

        kept: position of each cut -> the units held there.
        """
        graph = self.plain[variant].graph
        folded = StorageGraph.of(one_in_flight(graph, room_bytes=room_bytes))
        schedule = without_span_nodes(graph, schedule_from_cuts(folded, kept))
        try:
            played = fold_simulation(StorageGraph.of(graph), schedule)
        except IllegalScheduleError:
            return None
        plan = StagePlan.of(graph, schedule)
        self._add_plan(plan)
        fullest = int(np.argmax(played.stage_bytes[: graph.n_before_optimizer]))
        return plan.bytes_used, folded.position[graph.nodes[fullest].name]

    def _add_plan(self, plan: StagePlan) -> None:
        self.plans.append(plan)
        self.plans.sort(key=lambda plan: plan.time_s)


@dataclass(frozen=True, order=True)
class Box:
    """All plans of these variants whose stages save between `least` and `most` bytes.

    bound_s: no such plans that fit together are faster.
    variants: the index of each stage's variant.
    target: how much each stage saves in the solution of the cuts; what it is planned for.
    kept: for each stage, position of each cut -> the units that the solution holds there.
    planned: whether the stages have been planned for `target`.
    """

    bound_s: float
    variants: tuple[int, ...]
    least: Saved
    most: Saved
    target: Saved = dataclasses.field(compare=False)
    kept: tuple[Mapping[int, frozenset[int]], ...] = dataclasses.field(default=(), compare=False)
    planned: bool = dataclasses.field(default=False, compare=False)


class RankSearch:
    """The search. Call `run`, then read the result.

    best: the fastest plans found that fit together, one for each stage (None: none).
    best_s: the sum of their times.
    timed_out: the time limit ended the search, or a search of the method.
    """

    def __init__(
        self, place: Pipeline, given: Sequence[Solution], *, budget_bytes: int, deadline: Deadline
    ) -> None:
        self._place, self._budget_bytes, self._deadline = place, budget_bytes, deadline
        self.stages = [
            Stage(solution, [others for at, others in place.passes if at == local])
            for local, solution in enumerate(given)
        ]
        self._baseline_s = math.fsum(s.plain[0].time_s for s in self.stages)
        self._cuts: dict[tuple[int, ...], RankCuts] = {}
        self._positions: dict[tuple[int, ...], list[set[int]]] = {}
        self._boxes: list[Box] = []
        plain_s = (min(plan.time_s for plan in stage.plain) for stage in self.stages)
        self._closed_s = math.fsum(plain_s)  # least bound of boxes that are closed or not open yet
        self.best: tuple[StagePlan, ...] | None = None
        self.best_s = math.inf
        self.timed_out = False

    @property
    def lower_bound_s(self) -> float:
        """Seconds below which no plans that fit together are (inf: none fit)."""
        least_s = self._boxes[0].bound_s if self._boxes else math.inf
        return min(least_s, self._closed_s, self.best_s)

    @property
    def least_peak_bytes(self) -> int:
        """The peak of the rank if each stage has its known plan that saves the least."""
        used = ([plan.bytes_used for plan in stage.plans] for stage in self.stages)
        least = [min(each, key=lambda one: (one.saved_bytes, one.step_bytes)) for each in used]
        return peak_of(self._place, least)

    def run(self) -> None:
        """Search until the gap is at most GAP, N_BOXES are planned, or the time is up."""
        n_planned = 0
        try:
            self._update_best()
            self._boxes, self._closed_s = list(self._initial_boxes()), math.inf
            heapq.heapify(self._boxes)
            while self._boxes and self.best_s - self.lower_bound_s > GAP * self._baseline_s:
                box = self._boxes[0]  # stays in the heap until done: the time may run out before
                n_planned += not box.planned
                if n_planned > N_BOXES:
                    return
                found = list(self._halve(box) if box.planned else self._plan_box(box))
                heapq.heappop(self._boxes)
                for each in found:
                    heapq.heappush(self._boxes, each)
        except OutOfTimeError:
            self.timed_out = True

    def _initial_boxes(self) -> Iterator[Box]:
        """One box for each combination of variants, with all that the stages can save."""
        for variants in itertools.product(*(range(len(stage.plain)) for stage in self.stages)):
            pairs = list(zip(self.stages, variants, strict=True))
            steps = [StorageGraph.of(stage.plain[at].graph) for stage, at in pairs]
            least = tuple(folded.least_saved_bytes for folded in steps)
            most = tuple(folded.made_bytes for folded in steps)
            time_s = math.fsum(stage.plain[at].time_s for stage, at in pairs)
            yield from self._tighten(Box(time_s, variants, least, most, target=most))

    def _tighten(self, box: Box, *, as_milp: bool = False) -> Iterator[Box]:
        """Narrow the box to what the memory allows, and raise its bound; yields nothing if no plans
        in it fit.

        as_milp: solve the cuts as a MILP, not only its relaxation.
        """
        self._deadline.check()
        most = tuple(min(most, self._save_limit(box, stage)) for stage, most in enumerate(box.most))
        if any(map(operator.gt, box.least, most)):
            return
        found = self._cuts_of(box.variants).bound(
            box.least, most, as_milp=as_milp, gap=GAP / 2, deadline=self._deadline
        )
        stages = list(zip(self.stages, box.variants, most, strict=True))
        plain_s = math.fsum(stage.plain[at].time_s for stage, at, _ in stages)
        bounds_s = (s.bound_s(at, saved, s.others_bytes(box.least)) for s, at, saved in stages)
        bound_s = max(box.bound_s, plain_s + found.lost_s, math.fsum(bounds_s))
        if not math.isinf(bound_s):
            limits = zip(found.saved_bytes or box.target, box.least, most, strict=True)
            target = tuple(min(max(saved, least), limit) for saved, least, limit in limits)
            yield dataclasses.replace(
                box, bound_s=bound_s, most=most, target=target, kept=found.kept
            )

    def _plan_box(self, box: Box) -> Iterator[Box]:
        """Try to close the box: replay the solution of its cuts, add positions to the cuts while
        replays overflow, and at last plan the stages. Yields the box with its better bound."""
        for found in self._tighten(box, as_milp=True):
            grows = bool(found.kept) and self._replay_cuts(found)
            self._update_best()
            if self._may_improve(found) and grows:
                yield from self._plan_box(found)
                return
            if self._may_improve(found):
                self._plan_for(found)
            yield dataclasses.replace(found, planned=True)

    def _may_improve(self, box: Box) -> bool:
        """Whether plans in the box may be faster than the best ones by more than GAP."""
        return self.best_s - box.bound_s > GAP * self._baseline_s

    def _replay_cuts(self, box: Box) -> bool:
        """Replay the solution of the cuts; return whether overflows added positions to the cuts."""
        room_bytes = self._room_bytes(box.variants)
        each = zip(self.stages, box.variants, box.kept, strict=True)
        played = [stage.replay(at, kept, room_bytes=room_bytes) for stage, at, kept in each]
        found = [each for each in played if each is not None]
        if len(found) < len(played):
            return False
        saved_bytes = tuple(bytes_used.saved_bytes for bytes_used, _ in found)
        grows = False
        positions = self._positions.setdefault(box.variants, [set() for _ in self.stages])
        pairs = zip(self.stages, found, box.kept, positions, strict=True)
        for stage, (bytes_used, fullest), kept, known in pairs:
            is_over = bytes_used.step_bytes + stage.others_bytes(saved_bytes) > room_bytes
            if is_over and fullest not in kept and len(kept) <= N_CUT_POSITIONS:
                known.update((*kept, fullest))
                grows = True
        if grows:
            self._cuts.pop(box.variants)
        return grows

    def _plan_for(self, box: Box) -> None:
        """Plan each stage with the method, for the box's target."""
        room_bytes = self._room_bytes(box.variants)
        for stage, at, saved in zip(self.stages, box.variants, box.target, strict=True):
            others_bytes, left_s = stage.others_bytes(box.target), self._deadline.left_s / 2
            timed_out = stage.plan(at, saved, others_bytes, room_bytes=room_bytes, left_s=left_s)
            self.timed_out = self.timed_out or timed_out
        self._update_best()

    def _halve(self, box: Box) -> Iterator[Box]:
        """Halve the range of the stage for which it amounts to the most bytes, with all micro-
        batches in flight. A box of a single point is closed instead."""
        widths = [most - least for least, most in zip(box.least, box.most, strict=True)]
        if not any(widths):
            stages = zip(self.stages, box.variants, box.most, strict=True)
            bounds_s = (s.bound_s(at, saved, s.others_bytes(box.most)) for s, at, saved in stages)
            self._closed_s = min(self._closed_s, max(box.bound_s, math.fsum(bounds_s)))
            return
        held = [
            width
            * max(other.n_in_flight(stage) + (stage == at) for at, other in enumerate(self.stages))
            for stage, width in enumerate(widths)
        ]
        at = held.index(max(held))
        middle = (box.least[at] + box.most[at]) // 2
        below = (*box.most[:at], middle, *box.most[at + 1 :])
        above = (*box.least[:at], middle + 1, *box.least[at + 1 :])
        for half in (dataclasses.replace(box, most=below), dataclasses.replace(box, least=above)):
            yield from self._tighten(dataclasses.replace(half, planned=False))

    def _save_limit(self, box: Box, stage: int) -> int:
        """The most bytes that a stage can save if all the others save their least."""
        room_bytes = self._room_bytes(box.variants)
        found = []
        for local, others in self._place.passes:
            held = [n + (local == at) for at, n in enumerate(others)]
            others_bytes = held_in_flight(held, box.least) - held[stage] * box.least[stage]
            found.append((room_bytes - others_bytes) // held[stage] if held[stage] else room_bytes)
        return min(found)

    def _room_bytes(self, variants: tuple[int, ...]) -> int:
        """Bytes of the budget beyond the resident tensors of these variants."""
        bytes_used = [s.plain[at].bytes_used for s, at in zip(self.stages, variants, strict=True)]
        return self._budget_bytes - resident_bytes(bytes_used)

    def _cuts_of(self, variants: tuple[int, ...]) -> RankCuts:
        if variants not in self._cuts:
            graphs = [s.plain[at].graph for s, at in zip(self.stages, variants, strict=True)]
            room_bytes = self._room_bytes(variants)
            self._cuts[variants] = RankCuts(
                graphs,
                self._place.passes,
                room_bytes=room_bytes,
                positions=self._positions.get(variants, ()),
                deadline=self._deadline,
            )
        return self._cuts[variants]

    def _update_best(self, chosen: tuple[StagePlan, ...] = ()) -> None:
        """Update `best` with the fastest known plans that fit together, by depth-first search.

        chosen: the plans already chosen for the first stages.
        """
        self._deadline.check()
        if len(chosen) == len(self.stages):
            if peak_of(self._place, [plan.bytes_used for plan in chosen]) <= self._budget_bytes:
                self.best, self.best_s = chosen, math.fsum(plan.time_s for plan in chosen)
            return
        later = self.stages[len(chosen) + 1 :]
        others_s = math.fsum(p.time_s for p in (*chosen, *(stage.plans[0] for stage in later)))
        for plan in self.stages[len(chosen)].plans:
            if others_s + plan.time_s >= self.best_s:
                break
            self._update_best((*chosen, plan))
