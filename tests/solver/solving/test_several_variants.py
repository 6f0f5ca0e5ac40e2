"""A step of several variants: which is planned first, with what, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from graphs.graph import Graph
from graphs.rewrites import Variants
from solver.methods import METHODS, Method, Proposal
from solver.schedule import Request, Schedule
from solver.solving import attempt, solve_request
from tests.support.budgets import baseline_peak_bytes
from tests.support.synthetic_graphs import transformer

PLAIN = transformer(n_layers=3)
FULL_BYTES = baseline_peak_bytes(PLAIN)
TIGHT_BYTES = PLAIN.resident_bytes + int(0.7 * (FULL_BYTES - PLAIN.resident_bytes))
LIMIT_S = 1e7  # above that of `conftest.py`


@dataclass(frozen=True)
class Call:
    graph: Graph
    starts: Sequence[Schedule]
    time_limit_s: float


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What `auto` was called with."""
    found: list[Call] = []
    auto = METHODS["auto"]

    def propose(graph: Graph, **options: Any) -> Proposal:
        found.append(Call(graph, options["starts"], options["time_limit_s"]))
        return auto(graph, **options)

    recorded = Method(propose, proves_bound=True, takes_starts=True)
    monkeypatch.setattr(solve_request, "METHODS", {"auto": recorded})
    return found


def with_fewer_bytes(share: float) -> Graph:
    """The same step with smaller tensors in the backward pass."""
    made = {name for node in PLAIN.nodes if node.phase == "backward" for name in node.outputs}
    tensors = tuple(
        replace(t, size_bytes=int(share * t.size_bytes))
        if t.name in made and t.kind == "activation"
        else t
        for t in PLAIN.tensors
    )
    return replace(PLAIN, tensors=tensors, meta=replace(PLAIN.meta, rewrites=["in_place"]))


def test_each_variant_begins_with_the_schedules_of_those_before(calls: list[Call]) -> None:
    """So it is never slower, where it needs fewer bytes for the same operators."""
    rewritten = with_fewer_bytes(0.9)
    request = Request(TIGHT_BYTES, time_limit_s=LIMIT_S)
    alone = attempt(PLAIN, request)
    both = attempt(Variants(PLAIN, (PLAIN, rewritten)), request)
    assert [call.graph for call in calls] == [PLAIN, PLAIN, rewritten]
    start = calls[-1].starts[-1]
    assert start.order == alone.schedule.order
    assert start.graph_id == rewritten.graph_id
    assert both.simulation.time_s <= alone.simulation.time_s


def test_the_first_variant_gets_all_of_the_time_but_a_part_for_each_other(
    calls: list[Call],
) -> None:
    request = Request(TIGHT_BYTES, time_limit_s=LIMIT_S)
    attempt(Variants(PLAIN, (PLAIN, with_fewer_bytes(0.9))), request)
    assert calls[0].time_limit_s > 0.75 * LIMIT_S
    assert calls[1].time_limit_s > 0.75 * LIMIT_S  # the first was done at once


def test_where_a_variant_is_much_better_the_others_are_not_searched(calls: list[Call]) -> None:
    rewritten = with_fewer_bytes(0.1)
    fits_bytes = baseline_peak_bytes(rewritten)
    solution = attempt(
        Variants(PLAIN, (PLAIN, rewritten)), Request(fits_bytes, time_limit_s=LIMIT_S)
    )
    assert [call.graph for call in calls] == [rewritten]
    assert solution.status == "optimal"
    assert solution.lower_bound_s <= rewritten.baseline_time_s
