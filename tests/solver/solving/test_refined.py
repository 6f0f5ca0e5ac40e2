"""Refining: for whom, which variant, and what becomes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from graphs.graph import Graph
from graphs.rewrites import Variants
from solver.methods import METHODS, Proposal
from solver.schedule import Link, Place, Places, Request, Schedule, baseline, simulate
from solver.solving import attempt
from tests.support.budgets import baseline_peak_bytes
from tests.support.synthetic_graphs import chain

FIRST, SECOND = chain(n_blocks=5), chain(n_blocks=5, size_bytes=500)
IN_FLIGHT = dataclasses.replace(FIRST, n_in_flight=2)
BUDGET_BYTES = baseline_peak_bytes(FIRST)
PLAIN_S = FIRST.baseline_time_s

Asked = list[tuple[Graph, dict[str, Any]]]


def slow(graph: Graph, share: float = 0.8) -> Schedule:
    budget_bytes = int(share * baseline_peak_bytes(graph))
    found = METHODS["revolve"](graph, budget_bytes=budget_bytes, time_limit_s=60.0, seed=0)
    assert found.schedule is not None
    return found.schedule


@pytest.fixture
def refined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """`auto` finds slow schedules, and refines to the proposal that is given here."""

    def given(proposal: Proposal, found: dict[str, Schedule] | None = None) -> Asked:
        asked: Asked = []

        def propose(graph: Graph, **_: Any) -> Proposal:
            return Proposal((found or {}).get(graph.graph_id, slow(FIRST)), PLAIN_S)

        def refine(graph: Graph, **options: Any) -> Proposal:
            asked.append((graph, options))
            return proposal

        method = dataclasses.replace(METHODS["auto"], propose=propose, refine=refine)
        monkeypatch.setattr("solver.solving.solve_request.METHODS", {**METHODS, "auto": method})
        monkeypatch.setattr("solver.solving.solve_request._quick_bound_s", lambda *_: 0.0)
        return asked

    return given


def request(**options: Any) -> Request:
    return Request(**{"budget_bytes": BUDGET_BYTES, "time_limit_s": 60.0} | options)


def test_steps_on_the_device_alone_are_refined(refined: Callable[..., Asked]) -> None:
    asked = refined(Proposal(None))
    attempt(FIRST, request(places=Places(Place(10**9, Link(1e9, 1e9)))))
    attempt(FIRST, request(method="revolve"))
    attempt(IN_FLIGHT, request(budget_bytes=10**6))
    attempt(FIRST, request(), quick=True)
    assert not asked
    attempt(FIRST, request())
    assert len(asked) == 1


def test_what_is_faster_is_the_plan(refined: Callable[..., Asked]) -> None:
    asked = refined(Proposal(baseline(FIRST), PLAIN_S, timed_out=True))
    solution = attempt(FIRST, request())
    assert solution.schedule == baseline(FIRST)
    assert solution.timed_out
    assert asked[0][1]["start"] == slow(FIRST)
    assert asked[0][1]["proven_s"] == PLAIN_S


def test_what_is_slower_or_missing_changes_nothing(refined: Callable[..., Asked]) -> None:
    for proposal in (Proposal(None), Proposal(slow(FIRST, 0.6))):
        refined(proposal)
        solution = attempt(FIRST, request())
        assert solution.schedule == slow(FIRST)
        assert solution.lower_bound_s == PLAIN_S


def test_only_the_fastest_variant_is_refined(refined: Callable[..., Asked]) -> None:
    found = {FIRST.graph_id: slow(FIRST, 0.6), SECOND.graph_id: slow(SECOND)}
    asked = refined(Proposal(baseline(SECOND), PLAIN_S), found)
    solution = attempt(Variants(FIRST, (FIRST, SECOND)), request())
    assert [graph.graph_id for graph, _ in asked] == [SECOND.graph_id]
    assert asked[0][1]["start"].order == slow(SECOND).order
    assert solution.schedule == baseline(SECOND)


def test_the_fastest_plan_is_refined_where_it_is_fastest(refined: Callable[..., Asked]) -> None:
    nodes = (dataclasses.replace(node, time_s=0.9 * node.time_s) for node in SECOND.nodes)
    quicker = dataclasses.replace(SECOND, nodes=tuple(nodes))
    found = {FIRST.graph_id: slow(FIRST), quicker.graph_id: slow(FIRST)}  # the latter is illegal
    asked = refined(Proposal(None), found)
    with pytest.warns(UserWarning, match="made for another graph"):
        solution = attempt(Variants(FIRST, (FIRST, quicker)), request())
    assert [graph.graph_id for graph, _ in asked] == [quicker.graph_id]
    assert asked[0][1]["start"].order == slow(FIRST).order
    assert solution.graph.graph_id == quicker.graph_id
    assert solution.simulation.time_s == pytest.approx(0.9 * simulate(FIRST, slow(FIRST)).time_s)


@pytest.mark.parametrize("far_gap", [0.0, 10.0])
def test_plans_far_from_their_bounds_are_no_starts(
    monkeypatch: pytest.MonkeyPatch, far_gap: float
) -> None:
    starts: list[list[Schedule]] = []

    def propose(graph: Graph, **options: Any) -> Proposal:
        starts.append(options["starts"])
        return Proposal(dataclasses.replace(slow(FIRST), graph_id=graph.graph_id), PLAIN_S)

    method = dataclasses.replace(METHODS["auto"], propose=propose)
    monkeypatch.setattr("solver.solving.solve_request.METHODS", {"auto": method})
    monkeypatch.setattr("solver.solving.solve_request._quick_bound_s", lambda *_: 0.0)
    monkeypatch.setattr("solver.solving.solve_request.FAR_GAP", far_gap)
    attempt(Variants(FIRST, (FIRST, SECOND)), request(), quick=True)
    assert [[start.order for start in each] for each in starts] == [
        [],
        [slow(FIRST).order] if far_gap else [],
    ]
