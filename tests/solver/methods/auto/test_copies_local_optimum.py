"""Single steps between recomputation and copies: legal orders, never slower, and one that pays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from solver.bound import StorageGraph
from solver.methods.auto import with_copies as module
from solver.methods.auto.copies_local_optimum import Attempt, _neighbouring_orders, climb
from solver.methods.auto.copy_placement import find_gaps
from solver.schedule import (
    IllegalScheduleError,
    Link,
    Place,
    Places,
    free_after_last_use,
    keep,
    simulate,
)
from tests.support.budgets import budget_above_resident
from tests.support.schedules_with_copies import planned_step_s
from tests.support.synthetic_graphs import some_graph, u_shape


@pytest.mark.parametrize("first_seed", [0, 50])
def test_steps_lead_to_complete_orders(first_seed: int) -> None:
    """Some are illegal, as one alias keeps the old storage; most are not."""
    n_less = n_more = n_illegal = 0
    for seed in range(first_seed, first_seed + 50):
        graph, rng = some_graph(seed), random.Random(f"steps {seed}")
        order = keep(graph, [n for n in graph.producer if rng.random() < 0.5]).order
        folded = StorageGraph.of(graph)
        gaps = find_gaps(folded, order)
        for other in _neighbouring_orders(folded, Attempt(order, gaps, {}, 1.0)):
            try:
                simulate(graph, free_after_last_use(graph, other))
            except IllegalScheduleError:
                n_illegal += 1
                continue
            assert set(other) == set(order)
            n_less += len(other) < len(order)
            n_more += len(other) > len(order)
    assert n_less > 20
    assert n_more > 20
    assert n_illegal < n_less + n_more


def test_without_pressure_all_recomputation_is_taken_out() -> None:
    graph = u_shape(depth=3)
    folded = StorageGraph.of(graph)

    def place(order: Sequence[str]) -> Attempt:
        time_s = sum(graph.node_by_name[name].time_s for name in order)
        return Attempt(order, (), {}, time_s)

    start = place(keep(graph, ()).order)
    assert start.time_s > 1.01 * graph.baseline_time_s
    assert climb(folded, place, start, max_work=0) is start
    best = climb(folded, place, start, max_work=10**7)
    assert best.time_s == pytest.approx(graph.baseline_time_s)


@pytest.mark.slow
def test_less_is_lost_with_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = u_shape(depth=4)
    budget_bytes = budget_above_resident(graph, 0.3)
    places = Places(host=Place(10**18, Link(2e10, 2e10)))
    found_s = []
    for max_work in (0, module.MAX_LOCAL_SEARCH_WORK):
        monkeypatch.setattr(module, "MAX_LOCAL_SEARCH_WORK", max_work)
        found_s.append(planned_step_s(graph, budget_bytes=budget_bytes, places=places))
    assert found_s[1] < 0.97 * found_s[0]
