"""Recomputation around given copies: the step with fetches, and back from it."""

import random

import pytest

from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.methods import find_obstacle
from solver.methods.auto import with_copies as module
from solver.methods.auto.around_copies import (
    Visit,
    find_visits,
    recompute_around,
    with_fetches,
    without_fetches,
)
from solver.methods.auto.copy_placement import find_gaps, never_copied, place_copies
from solver.methods.auto.stages import recompute_only
from solver.schedule import Link, Place, Places, baseline, keep, simulate
from tests.support.budgets import baseline_peak_bytes
from tests.support.schedules_with_copies import planned_step_s
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import random_dag, some_graph

LINK = Link(1.0, 1.0)


def line() -> Graph:
    """Six nodes of a second each; x is read by the first and the last."""
    return make(
        [
            op("f1", "", "x"),
            op("f2", "x", "y"),
            op("f3", "y", "z"),
            op("b3", "z", "dz", phase="backward"),
            op("b2", "dz y", "dy", phase="backward"),
            op("b1", "dy x", "dx", phase="backward"),
        ],
        {"x": 1, "y": 1, "z": 1, "dz": 1, "dy": 1, "dx": 1},
        outputs="dx",
    )


def test_a_unit_is_away_from_the_end_of_its_store_to_the_begin_of_its_fetch() -> None:
    folded, order = StorageGraph.of(line()), baseline(line()).order
    gaps = [gap for gap in find_gaps(folded, order) if folded.unit_names[gap.unit] in "xy"]
    # x is stored from 1 to 2 and y from 2 to 3; y is due at 4 and x at 5, a second each.
    assert find_visits(folded, order, gaps, LINK) == [Visit(0, 2, 4)]
    assert find_visits(folded, order, gaps, Link(0.2, 0.2)) == []


def test_a_unit_comes_back_by_a_node_that_may_run_again() -> None:
    graph = line()
    folded = StorageGraph.of(graph)
    step = with_fetches(folded, [Visit(0, 2, 4)], LINK)
    names = "f1 fetch.x f2 gone.x f3 b3 back.x b2 b1"
    assert [node.name for node in step.nodes] == names.split()
    assert step.node_by_name["f1"].workspace_bytes == 1
    assert not step.node_by_name["f1"].recomputable
    assert without_fetches(folded, baseline(step).order) == (baseline(graph).order, [])
    again = ["f1", "fetch.x", "f2", "gone.x", "f3", "b3", "fetch.x", "back.x", "b2", "b1"]
    order, gaps = without_fetches(folded, again)
    assert order == baseline(graph).order
    assert [(gap.first, gap.last, gap.unit) for gap in gaps] == [(1, 5, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_orders_around_copies_are_orders_of_the_step(first_seed: int) -> None:
    n_with_gaps = n_recomputing = 0
    for seed in range(first_seed, first_seed + 100):
        graph, rng = some_graph(seed), random.Random(f"around {seed}")
        order = keep(graph, [n for n in graph.producer if rng.random() < 0.6]).order
        folded = StorageGraph.of(graph)
        gaps = [
            gap for gap in find_gaps(folded, order) if folded.maker[gap.unit] < folded.n_forward
        ]
        link = Link(*[10 * sum(folded.unit_bytes) / (graph.baseline_time_s or 1.0)] * 2)
        visits = find_visits(folded, order, gaps, link)
        assert {visit.unit for visit in visits}.isdisjoint(never_copied(folded))
        alone = [visit for visit in visits if _made_alone(folded, visit.unit)]
        if not alone:
            continue
        step = with_fetches(folded, alone, link)
        peak_bytes = baseline_peak_bytes(step)
        for share in (0.6, 0.8, 0.9):
            budget_bytes = int(share * peak_bytes)
            schedule = recompute_only(
                step, budget_bytes=budget_bytes, time_limit_s=600.0, quick=True
            ).schedule
            if schedule is None:
                continue
            around, away = without_fetches(folded, schedule.order)
            places = Places(host=Place(10**18, link))
            placed = place_copies(folded, around, away, budget_bytes=budget_bytes, places=places)
            simulation = simulate(graph, placed.schedule, places=places)
            assert simulation.time_s == pytest.approx(placed.time_s, rel=1e-9, abs=1e-12)
            assert {gap.unit for gap in away} <= {visit.unit for visit in alone}
            n_with_gaps += bool(away)
            n_recomputing += len(around) > len(graph.nodes)
    assert n_with_gaps > 5
    assert n_recomputing > 5


def _made_alone(folded: StorageGraph, u: int) -> bool:
    outputs = folded.graph.nodes[folded.maker[u]].outputs
    return sum(folded.unit_of.get(name) == u for name in outputs) == 1


@pytest.mark.slow
def test_less_is_lost_around_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph on which no other stage finds a plan that is as fast."""
    graph = random_dag(seed=3, n_forward=14, n_later=10)
    least_bytes = find_obstacle(graph).reached_bytes
    peak_bytes = baseline_peak_bytes(graph)
    rate = 0.3 * sum(StorageGraph.of(graph).unit_bytes) / graph.baseline_time_s
    places = Places(host=Place(10**18, Link(rate, rate)))
    budget_bytes = least_bytes + int(0.2 * (peak_bytes - least_bytes))
    found = []
    for stages in (_without(module.COPY_STAGES, recompute_around), module.COPY_STAGES):
        monkeypatch.setattr(module, "COPY_STAGES", stages)
        time_s = planned_step_s(graph, budget_bytes=budget_bytes, places=places)
        found.append(time_s / graph.baseline_time_s)
    assert found[1] < 1.25 < 1.26 < found[0]


def _without(stages: tuple[module.Stage, ...], gone: module.Stage) -> tuple[module.Stage, ...]:
    return tuple(stage for stage in stages if stage is not gone)
