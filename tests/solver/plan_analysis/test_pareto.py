"""The sweep over budgets: monotone curves, proofs that hold, budgets that mean something."""

from __future__ import annotations

import dataclasses
import math
import signal

import pytest

from graphs.synthetic.nets import chain, residual
from solver.methods.least_budget import find_obstacle
from solver.methods.proposal import Method, Proposal
from solver.methods.registry import METHODS
from solver.plan_analysis.pareto import N_BUDGETS, Curve, default_budgets, sweep
from solver.python_api import sweep as sweep_of_users
from solver.reporting import plot
from solver.reporting.rows import curve_text
from solver.schedule import Link, Place, Places, Request
from solver.schedule.simulator import simulate
from solver.sizes_deadlines_progress import format_size, format_size_up
from solver.sizes_deadlines_progress.deadline import Deadline, ctrl_c_ends_searches
from solver.solving import attempt, solve
from tests.support.budgets import baseline_peak_bytes
from tests.support.small_graphs import make, op

GRAPH = residual(n_blocks=5)
PEAK_BYTES = baseline_peak_bytes(GRAPH)
LONG = Request(budget_bytes=0, time_limit_s=600.0)


@pytest.fixture(scope="module")
def curve() -> Curve:
    return sweep(GRAPH, methods=("sqrt", "every_block", "none"), like=LONG)


@pytest.mark.slow
def test_overhead_never_rises_with_the_budget(curve):
    for method in curve.methods:
        points = curve.of(method)
        budgets = [point.request.budget_bytes for point in points]
        assert budgets == sorted(budgets)
        times_s = [math.inf if p.simulation is None else p.simulation.time_s for p in points]
        assert times_s == sorted(times_s, reverse=True)


@pytest.mark.slow
def test_the_bound_never_rises_either_and_holds_for_every_method(curve):
    for method in curve.methods:
        bounds_s = [point.lower_bound_s for point in curve.of(method)]
        assert bounds_s == sorted(bounds_s, reverse=True)
    for point in curve.points:
        if point.simulation is not None:
            assert point.simulation.time_s >= point.lower_bound_s * (1 - 1e-12)
    at = {}
    for point in curve.points:
        at.setdefault(point.request.budget_bytes, set()).add(point.lower_bound_s)
    assert all(len(bounds) == 1 for bounds in at.values())


def test_every_point_fits_its_budget_by_the_simulator(curve):
    for point in curve.points:
        if point.schedule is not None:
            simulation = simulate(GRAPH, point.schedule)
            assert simulation == point.simulation
            assert simulation.peak_bytes <= point.request.available_bytes


def test_the_last_budget_is_the_peak_without_checkpointing(curve):
    last = curve.of("none")[-1]
    assert last.request.budget_bytes == PEAK_BYTES
    assert last.overhead == 0.0
    assert last.status == "optimal"


def test_a_cheaper_schedule_is_carried_up(monkeypatch):
    """A method that does worse with more room does not show in the curve."""
    small, large = 0.7 * PEAK_BYTES, 0.9 * PEAK_BYTES

    def odd(graph, *, budget_bytes, **options):
        if budget_bytes > small:
            return METHODS["every_block"](graph, budget_bytes=budget_bytes, **options)
        return METHODS["sqrt"](graph, budget_bytes=budget_bytes, **options)

    monkeypatch.setitem(METHODS, "sqrt_then_worse", Method(odd))
    first, second = sweep(
        GRAPH, budgets=[int(small), int(large)], methods=["sqrt_then_worse"], like=LONG
    ).points
    assert first.schedule is not None
    assert second.simulation.time_s <= first.simulation.time_s
    assert second.request.budget_bytes == int(large)


def test_a_schedule_is_carried_to_budgets_where_nothing_was_found(monkeypatch):
    def moody(graph, *, budget_bytes, **options):
        if budget_bytes == PEAK_BYTES:
            return Proposal(None)
        return METHODS["every_block"](graph, budget_bytes=budget_bytes, **options)

    monkeypatch.setitem(METHODS, "moody", Method(moody))
    budgets = [int(0.9 * PEAK_BYTES), PEAK_BYTES]
    first, second = sweep(GRAPH, budgets=budgets, methods=["moody"], like=LONG).points
    assert first.schedule is not None
    assert second.schedule == first.schedule
    assert second.status in ("feasible", "optimal")


def test_known_answers_are_points_and_not_sought_again(monkeypatch):
    known = solve(GRAPH, budget=int(0.83 * PEAK_BYTES), method="sqrt")
    seen = []

    def watched(graph, request, **options):
        seen.append(request.budget_bytes)
        return attempt(graph, request, **options)

    monkeypatch.setattr("solver.plan_analysis.pareto.attempt", watched)
    curve = sweep(GRAPH, budgets=[PEAK_BYTES], methods=["sqrt"], known=[known], like=LONG)
    assert [p.request.budget_bytes for p in curve.points] == [int(0.83 * PEAK_BYTES), PEAK_BYTES]
    assert seen == [PEAK_BYTES]


def test_ctrl_c_keeps_the_points_that_are_there(monkeypatch):
    budgets = [int(share * PEAK_BYTES) for share in (0.7, 0.8, 0.9, 1.0)]
    whole = sweep(GRAPH, budgets=budgets, methods=["sqrt", "none"], like=LONG)
    counts: list[tuple[int, int]] = []

    def ctrl_c_in_the_sixth(graph, request, **options):
        if len(counts) == 5:
            signal.raise_signal(signal.SIGINT)
        return attempt(graph, request, **options)

    monkeypatch.setattr("solver.plan_analysis.pareto.attempt", ctrl_c_in_the_sixth)
    with ctrl_c_ends_searches() as interrupt:
        curve = sweep(
            GRAPH,
            budgets=budgets,
            methods=["sqrt", "none"],
            like=LONG,
            on_point=lambda n_done, n_all: counts.append((n_done, n_all)),
        )
    assert interrupt.is_set()
    assert counts == [(n, 8) for n in range(1, 7)]
    assert [p.overhead for p in curve.of("sqrt")] == [p.overhead for p in whole.of("sqrt")]
    assert [p.request.budget_bytes for p in curve.of("none")] == budgets[:2]


def test_ctrl_c_before_any_point_leaves_an_empty_curve():
    with ctrl_c_ends_searches():
        signal.raise_signal(signal.SIGINT)
        curve = sweep(GRAPH, budgets=[PEAK_BYTES], methods=["sqrt"], like=LONG)
    assert curve.points == ()


def test_without_a_front_door_ctrl_c_ends_the_sweep(monkeypatch):
    def ctrl_c(*_arguments, **_options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("solver.plan_analysis.pareto.attempt", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        sweep(GRAPH, budgets=[PEAK_BYTES], methods=["sqrt"], like=LONG)


def test_the_reserve_is_on_top_of_the_default_budgets():
    plain = default_budgets(GRAPH, method="sqrt", time_limit_s=600)
    kept = default_budgets(GRAPH, method="sqrt", time_limit_s=600, reserve_bytes=1000)
    assert kept == tuple(size + 1000 for size in plain)
    assert len(plain) == N_BUDGETS
    assert plain[-1] == PEAK_BYTES


@pytest.mark.slow
def test_a_quick_curve_goes_down_to_the_least_feasible_budget():
    graph = residual(n_blocks=4)
    obstacle = find_obstacle(graph)
    curve = sweep(graph, n_budgets=4, like=LONG, quick=True)
    assert len(curve.points) == 4
    assert curve.points[0].request.budget_bytes == obstacle.reached_bytes
    assert all(point.schedule is not None for point in curve.points)
    assert curve.least_planned_bytes == obstacle.reached_bytes
    assert curve.proven_bytes == obstacle.proven_bytes
    assert curve_text(curve) == (
        f"quick: 4 searches with less work; plans down to "
        f"{format_size_up(obstacle.reached_bytes)}; proven: none below "
        f"{format_size(obstacle.proven_bytes)}"
    )


@pytest.fixture
def blind_method(monkeypatch):
    """A method that knows only the schedules that it is given."""

    def blind(graph, *, budget_bytes, starts=(), **options):
        found = [s for s in starts if simulate(graph, s).peak_bytes <= budget_bytes]
        return Proposal(next(iter(found), None))

    able = dataclasses.replace(METHODS["auto"], propose=blind, takes_places=False)
    monkeypatch.setitem(METHODS, "blind", able)


@pytest.mark.usefixtures("blind_method")
def test_where_searches_find_nothing_the_plan_of_the_least_budget_is_a_point():
    curve = sweep(GRAPH, n_budgets=3, methods=["blind"], like=LONG, quick=True)
    assert all(point.schedule is not None for point in curve.points)


@pytest.mark.usefixtures("blind_method")
@pytest.mark.parametrize("sweep_budgets", [sweep, sweep_of_users])
def test_default_budgets_bring_the_plan_of_the_least(sweep_budgets):
    """The search for them may have found it in more time than a point of the sweep has."""
    budgets = default_budgets(GRAPH, n_budgets=3, time_limit_s=600)
    curve = sweep_budgets(GRAPH, budgets=budgets, methods=["blind"])
    assert [point.request.budget_bytes for point in curve.points] == list(budgets)
    assert all(point.schedule is not None for point in curve.points)


def test_with_a_host_budgets_below_the_least_of_recomputation_are_tried():
    # f1 runs once, so x or y waits for the end beside big, unless one is on the host.
    graph = make(
        [
            op("f1", "", "x", recomputable=False),
            op("f2", "x", "y"),
            op("b1", "", "big", phase="backward"),
            op("b2", "y", "z", phase="backward"),
        ],
        {"x": 4, "y": 6, "big": 9, "z": 0},
        outputs="z",
    )
    places = Places(host=Place(100, Link(1000.0, 1000.0)))
    alone = sweep(graph, n_budgets=6, like=LONG)
    beside = sweep(graph, n_budgets=6, like=dataclasses.replace(LONG, places=places))
    assert alone.least_planned_bytes == find_obstacle(graph).reached_bytes == 13
    assert beside.least_planned_bytes < 13
    assert beside.proven_bytes == 10
    least = beside.points[0]
    assert least.request.budget_bytes == beside.least_planned_bytes == 10
    assert least.schedule.has_copies
    title = plot.pareto(beside).get_title(loc="left").replace("\n", " ")
    assert "with 100 B of host memory at 1.00 KB/s" in title
    assert "host memory" not in plot.pareto(alone).get_title(loc="left")


def test_the_first_default_budget_is_feasible():
    first = default_budgets(GRAPH, method="sqrt", time_limit_s=600)[0]
    assert solve(GRAPH, budget=first, method="sqrt").schedule is not None


def test_a_budget_below_the_reserve_is_refused():
    with pytest.raises(ValueError, match="above the reserve of 100 bytes"):
        sweep(GRAPH, budgets=[50, 200], like=Request(budget_bytes=0, reserve_bytes=100))
    with pytest.raises(ValueError, match="must be above the reserve"):
        sweep(GRAPH, budgets=[])


def test_a_graph_without_room_has_one_budget():
    graph = chain(n_blocks=1)
    assert len(default_budgets(graph, time_limit_s=600)) >= 1


def test_a_curve_is_frozen(curve):
    with pytest.raises(dataclasses.FrozenInstanceError):
        curve.points = ()


# The least budget.


@pytest.mark.parametrize("method", ["none", "every_block", "sqrt"])
def test_the_least_budget_is_reached_and_little_less_is_not(method):
    options = {"time_limit_s": 20, "seed": 0}
    least_bytes = find_obstacle(GRAPH, method=METHODS[method]).reached_bytes
    assert METHODS[method](GRAPH, budget_bytes=least_bytes, **options).schedule is not None
    less_bytes = least_bytes - int(0.02 * PEAK_BYTES)
    assert METHODS[method](GRAPH, budget_bytes=less_bytes, **options).schedule is None


def test_the_least_budget_without_time_is_the_peak():
    found = find_obstacle(GRAPH, method=METHODS["sqrt"], deadline=Deadline(-math.inf))
    assert found.reached_bytes == PEAK_BYTES
    assert found.cut_short
