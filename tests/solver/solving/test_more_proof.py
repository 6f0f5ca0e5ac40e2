"""More proof: for whom, for which variants, and what becomes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from graphs.graph import Graph
from graphs.rewrites import Variants
from solver.methods import METHODS, Proposal
from solver.schedule import Link, Place, Places, Request, Schedule, Solution, baseline, simulate
from solver.solving import attempt
from tests.support.budgets import baseline_peak_bytes
from tests.support.synthetic_graphs import chain

FIRST, SECOND = chain(n_blocks=5), chain(n_blocks=5, size_bytes=500)
IN_FLIGHT = dataclasses.replace(FIRST, n_in_flight=2)
BUDGET_BYTES = baseline_peak_bytes(FIRST)
PLAIN_S = FIRST.baseline_time_s

Asked = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def with_proofs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """`auto` finds what is given here for each graph, and proves what is given at last."""

    def given(**of_graph: tuple[Proposal, Proposal]) -> Asked:
        asked: Asked = []
        names = {FIRST.graph_id: "first", SECOND.graph_id: "second", IN_FLIGHT.graph_id: "first"}

        def propose(graph: Graph, **_: Any) -> Proposal:
            return of_graph[names[graph.graph_id]][0]

        def prove_more(graph: Graph, **options: Any) -> Proposal:
            asked.append((names[graph.graph_id], options))
            return of_graph[names[graph.graph_id]][1]

        method = dataclasses.replace(
            METHODS["auto"], propose=propose, refine=None, prove_more=prove_more
        )
        module = "solver.solving.solve_request.METHODS"
        monkeypatch.setattr(module, {**METHODS, "auto": method})
        monkeypatch.setattr("solver.solving.solve_request._quick_bound_s", lambda *_: 0.0)
        return asked

    return given


def planned(step: Graph | Variants, *, thorough: bool = True, **of_request: Any) -> Solution:
    options = {"budget_bytes": BUDGET_BYTES, "time_limit_s": 300.0} | of_request
    return attempt(step, Request(**options), thorough=thorough)


def test_only_a_long_search_on_the_device_alone_asks_for_it(
    with_proofs: Callable[..., Asked],
) -> None:
    found = Proposal(baseline(FIRST), PLAIN_S)
    asked = with_proofs(first=(found, found))
    planned(FIRST, thorough=False)
    planned(FIRST, time_limit_s=299.0)
    planned(FIRST, places=Places(Place(10**9, Link(1e9, 1e9))))
    planned(FIRST, budget_of="reserved")
    planned(FIRST, method="revolve")
    planned(IN_FLIGHT, budget_bytes=10**6)
    assert not asked
    planned(FIRST)
    assert [name for name, _ in asked] == ["first"]


def slow(graph: Graph) -> Schedule:
    budget_bytes = int(0.8 * baseline_peak_bytes(graph))
    found = METHODS["revolve"](graph, budget_bytes=budget_bytes, time_limit_s=60.0, seed=0)
    assert found.schedule is not None
    return found.schedule


@pytest.mark.parametrize(
    ("bounds", "more", "names", "proven"),
    [
        ((0.01, 0.02), (0.015, 0.025), ["first"], 0.015),  # the least is as far as it comes
        ((0.01, 0.02), (0.022, 0.025), ["first", "second"], 0.022),
        ((0.01, 0.02), (0.022, 0.021), ["first", "second"], 0.021),
        ((0.02, 0.01), (0.025, 0.01), ["second"], 0.01),
    ],
)
def test_the_variant_with_the_least_bound_is_next(
    bounds: tuple[float, float],
    more: tuple[float, float],
    names: list[str],
    proven: float,
    with_proofs: Callable[..., Asked],
) -> None:
    """All of these are shares of the plain step's time, lost."""
    found, proven_more = (
        [Proposal(schedule, (1.0 + share) * PLAIN_S) for schedule, share in zip(*each, strict=True)]
        for each in (((slow(FIRST), slow(SECOND)), bounds), ((None, None), more))
    )
    first, second = zip(found, proven_more, strict=True)
    asked = with_proofs(first=first, second=second)
    solution = planned(Variants(FIRST, (FIRST, SECOND)))
    assert [name for name, _ in asked] == names
    assert solution.lower_bound_s == pytest.approx((1.0 + proven) * PLAIN_S)
    assert solution.schedule == slow(FIRST)
    for name, options in asked:
        share = bounds[0 if name == "first" else 1]
        assert options["proven_s"] == pytest.approx((1.0 + share) * PLAIN_S)
        assert options["known_s"] == simulate(FIRST, slow(FIRST)).time_s


def test_a_faster_schedule_counts(with_proofs: Callable[..., Asked]) -> None:
    more = Proposal(baseline(FIRST), PLAIN_S, timed_out=True)
    with_proofs(first=(Proposal(slow(FIRST)), more))
    solution = planned(FIRST)
    assert solution.schedule == baseline(FIRST)
    assert solution.status == "optimal"
    assert solution.timed_out


def test_nothing_is_proven_of_a_step_without_a_schedule(with_proofs: Callable[..., Asked]) -> None:
    asked = with_proofs(second=(Proposal(None, timed_out=True), Proposal(None)))
    assert planned(SECOND).status == "time_limit"
    assert not asked
