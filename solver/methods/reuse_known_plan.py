"""A plan for new shapes without a search: apply the decisions of a known plan to the new step.

Steps of two sequence lengths have the same operators under the same names, so "recompute this
before that operator" applies to both. Smaller shapes leave room; recomputation that is no longer
necessary is then removed. A few LPs bound what a search could gain. If the schedule fits and the
bound leaves little to gain, it is the answer; otherwise it is a start for the search.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphs.graph import Graph
from graphs.rewrites import Variant, Variants
from solver.bound import StorageGraph, least_time_s, relaxed_bound
from solver.methods.auto import drop_recomputation
from solver.schedule import (
    Request,
    SavedSchedule,
    Schedule,
    Solution,
    free_after_last_use,
    simulate_if_legal,
    simulate_unplanned,
)
from solver.sizes_deadlines_progress import Deadline, now_s

REUSE_LOSS = 0.02
"""How much larger the gap of a reused plan may be than that of the known plan, as a share of the
baseline's time. Reuse saves a search of seconds to a minute for every new length.
"""
N_POSITIONS = 3
"""Positions whose LPs bound the time. On GPT-2, Llama, T5 and a ResNet the search's own bound is at
most 0.1 points of the baseline higher.
"""


@dataclass(frozen=True)
class KnownPlan:
    """A schedule that a search found, the rewrites of its graph, and the gap that was left."""

    schedule: Schedule
    rewrites: Variant
    gap: float

    @classmethod
    def of(cls, plan: Solution | SavedSchedule) -> KnownPlan:
        """Raises ValueError for a solution without a schedule."""
        if plan.schedule is None:
            raise ValueError("a solution without a schedule has nothing to reuse")
        if isinstance(plan, Solution):
            return cls(plan.schedule, tuple(plan.graph.meta.rewrites), plan.gap or 0.0)
        slower_s = max(0.0, plan.time_s - plan.lower_bound_s)
        gap = slower_s / plan.baseline_time_s if plan.baseline_time_s else 0.0
        return cls(plan.schedule, plan.rewrites, gap)


WITHOUT_RECOMPUTATION = KnownPlan(Schedule(ops=(), graph_id=""), rewrites=(), gap=0.0)
"""The plan that recomputes nothing; it applies to any step."""


def transfer_schedule(graph: Graph, schedule: Schedule) -> Schedule:
    """Recompute on this graph what another graph's schedule recomputes before the same ops.

    If this graph lacks an operator, the recomputation before it moves to the next one that exists.
    Nodes that this graph cannot recompute are kept. The result may be illegal; the simulator
    decides.
    """
    known = graph.node_by_name
    ran: set[str] = set()
    to_recompute: list[str] = []
    recompute_before: dict[str, list[str]] = {}
    for name in schedule.order:
        if name in known and name in ran:
            to_recompute += [name] if known[name].recomputable else []
        elif name in known:
            recompute_before[name], to_recompute = to_recompute, []
        ran.add(name)
    order = [
        each for node in graph.nodes for each in (*recompute_before.get(node.name, ()), node.name)
    ]
    return free_after_last_use(graph, (*order, *to_recompute))


def reuse_plan(variants: Variants, known: KnownPlan, request: Request) -> Solution | None:
    """Apply the known plan's decisions to the step, of which a single variant is planned.

    Returns None if they do not fit, or if a search may find a plan that is faster by more than
    REUSE_LOSS. The bound holds for this program alone, not for its other variants.
    """
    (graph,) = variants.planned
    started_s = now_s()
    deadline, budget_bytes = Deadline.after(request.time_limit_s), request.available_bytes
    folded = StorageGraph.of(graph)
    schedule = drop_recomputation(
        folded,
        transfer_schedule(graph, known.schedule),
        budget_bytes=budget_bytes,
        deadline=deadline,
    )
    simulation = simulate_if_legal(graph, schedule)
    if simulation is None or simulation.peak_bytes > budget_bytes:
        return None
    lost_share = relaxed_bound(
        folded, budget_bytes=budget_bytes, n_positions=N_POSITIONS, deadline=deadline
    )
    bound_s = max(graph.baseline_time_s, least_time_s(graph, lost_share=lost_share))
    found = Solution(
        status="feasible",
        graph=graph,
        schedule=schedule,
        simulation=simulation,
        request=request,
        baseline=simulate_unplanned(variants.plain),
        lower_bound_s=bound_s,
        method=request.method,
        solve_time_s=now_s() - started_s,
        variants=variants,
    ).with_bound(bound_s)
    return found if (found.gap or 0.0) <= known.gap + REUSE_LOSS else None
