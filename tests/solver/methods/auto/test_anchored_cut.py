"""The single cut with anchors, and searches that begin from known schedules."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from graphs.graph import Graph
from graphs.synthetic import nets
from solver.bound.cut import solve_cuts
from solver.bound.lower_bound import binding_cut
from solver.bound.storage_graph import StorageGraph
from solver.methods.auto import stages
from solver.methods.auto.anchored_cut import offer_anchored
from solver.methods.auto.from_cuts import schedule_from_cuts
from solver.methods.auto.search import Search
from solver.methods.auto_method import auto
from solver.methods.proposal import Method, Proposal
from solver.plan_analysis.pareto import sweep
from solver.schedule.ops import Schedule
from solver.schedule.recompute import baseline
from solver.schedule.simulator import simulate
from tests.support.budgets import budget_above_least

RECURRENT = nets.recurrent(n_steps=60)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("share", "gap"), [(0.5, 1e-3), (0.4, 1e-3), (0.3, 0.02), (0.1, 0.02)])
def test_anchors_fit_where_the_cut_alone_overflows(share: float, gap: float) -> None:
    graph = nets.recurrent(n_steps=200)
    folded, budget_bytes = StorageGraph.of(graph), budget_above_least(graph, share)
    base, lost_share = binding_cut(folded, budget_bytes=budget_bytes).ranked_positions[0]
    alone = solve_cuts(folded, positions=[base], budget_bytes=budget_bytes, as_milp=True)
    assert simulate(graph, schedule_from_cuts(folded, alone.kept)).peak_bytes > budget_bytes
    search = Search(folded, budget_bytes=budget_bytes, time_limit_s=600)
    search.prove(lost_share)
    offer_anchored(search, base=base)
    assert search.best[1].peak_bytes <= budget_bytes
    assert search.gap <= gap


def test_the_time_limit_leaves_a_known_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clock leaves no time to find anything, what was known is handed back."""
    monkeypatch.setattr(stages, "_fallback_after_time_limit", lambda *_, **__: None)
    budget_bytes = budget_above_least(RECURRENT, 0.5)
    known = auto(RECURRENT, budget_bytes=budget_bytes, time_limit_s=600, seed=0).schedule
    cold = auto(RECURRENT, budget_bytes=budget_bytes, time_limit_s=0.0, seed=0)
    assert cold.schedule is None
    hurried = auto(RECURRENT, budget_bytes=budget_bytes, time_limit_s=0.0, seed=0, starts=[known])
    assert hurried.timed_out
    assert simulate(RECURRENT, hurried.schedule).time_s <= simulate(RECURRENT, known).time_s


def test_a_known_schedule_that_does_not_fit_is_not_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "_fallback_after_time_limit", lambda *_, **__: None)
    budget_bytes = budget_above_least(RECURRENT, 0.5)
    found = auto(
        RECURRENT,
        budget_bytes=budget_bytes,
        time_limit_s=0.0,
        seed=0,
        starts=[baseline(RECURRENT)],
    )
    assert found.schedule is None


@pytest.mark.slow
def test_a_sweep_hands_each_search_the_schedule_before(monkeypatch: pytest.MonkeyPatch) -> None:
    handed = []

    def spy(graph: Graph, *, starts: Sequence[Schedule] = (), **options: Any) -> Proposal:
        found = auto(graph, starts=starts, **options)
        handed.append((options["budget_bytes"], tuple(starts), found.schedule))
        return found

    front_door = importlib.import_module("solver.solving.solve_request")
    monkeypatch.setattr(front_door, "METHODS", {"auto": Method(spy, takes_starts=True)})
    budgets = [budget_above_least(RECURRENT, share) for share in (0.5, 0.6, 0.7)]
    sweep(RECURRENT, budgets=budgets)
    assert [budget for budget, _, _ in handed] == budgets
    assert [starts for _, starts, _ in handed] == [(), (handed[0][2],), (handed[1][2],)]
