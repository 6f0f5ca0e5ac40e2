"""The timeline of copies, against the simulator's figures and by hand."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from graphs.synthetic.nets import residual
from solver.plan_analysis.copy_timeline import Copies, copies, trips_of
from solver.reporting import copy_rows
from solver.schedule import Link, Place, Places, Request, Solution, baseline, simulate
from tests.support.schedules_with_copies import random_copies, random_places
from tests.support.small_graphs import make, op, plan

HOST = Places(host=Place(1000, Link(1.0, 0.5)))
GRAPH = make(
    [
        op("f", "x", "a"),
        op("g", "a", "b"),
        op("h", "b", "c"),
        op("k", "c a", "d", phase="backward"),
    ],
    {"x": 1, "a": 2, "b": 1, "c": 1, "d": 1},
    outputs="d",
)


def planned(graph, schedule, places) -> Solution:
    simulation = simulate(graph, schedule, places=places)
    return Solution(
        status="feasible",
        graph=graph,
        schedule=schedule,
        simulation=simulation,
        request=Request(budget_bytes=simulation.peak_bytes, places=places),
        baseline=simulate(graph, baseline(graph)),
        lower_bound_s=0.0,
        method="auto",
        solve_time_s=0.0,
    )


def by_hand() -> Copies:
    """a goes out from 1 s to 3 s, while g and h run, and back from 3 s to 7 s; k waits for it."""
    schedule = plan(GRAPH, "f store:a g -a h -b fetch:a drop:a k -a -c")
    found = copies(planned(GRAPH, schedule, HOST))
    assert found is not None
    return found


def test_where_a_storage_is_when() -> None:
    (trip,) = by_hand().trips
    assert (trip.storage, trip.size_bytes, trip.maker.name) == ("a", 2, "f")
    # its bytes are given up when g has run and the copy has ended, at 3 s; h runs until 4 s
    assert (trip.out_s, trip.back_s) == ((1.0, 3.0), (4.0, 8.0))
    assert (trip.from_s, trip.until_s) == (1.0, 8.0)
    assert trip.reader.name == "k"


def test_what_waits_for_what() -> None:
    first, second = by_hand().stalls
    assert (first.start_s, first.end_s, first.storage) == (2.0, 3.0, "a")
    assert first.node.name == "h"
    assert (second.start_s, second.end_s, second.storage) == (4.0, 8.0, "a")
    assert second.node.name == "k"
    texts = dict(copy_rows.stall_rows(by_hand()))
    assert texts["waiting"] == "5.00 s in 2 stalls"


def test_the_streams_and_the_host() -> None:
    found = by_hand()
    assert [(s.title, s.n_ops, s.size_bytes, s.busy_s) for s in found.streams] == [
        ("compute", 4, 0, 4.0),
        ("out", 1, 2, 2.0),
        ("in", 1, 2, 4.0),
    ]
    assert [s.share for s in found.streams] == pytest.approx([4 / 9, 2 / 9, 4 / 9])
    assert found.host_bytes() == ((1.0, 2), (8.0, 0))


def test_the_timeline_in_letters(monkeypatch) -> None:
    monkeypatch.setattr(copy_rows, "N_COLUMNS", 9)
    assert list(copy_rows.timeline_rows(by_hand()))[:4] == [
        ("compute", "## #    #"),
        ("out", " ##      "),
        ("in", "    #### "),
        ("on the host", " ####### "),
    ]
    monkeypatch.setattr(copy_rows, "N_COLUMNS", 3)
    assert dict(copy_rows.timeline_rows(by_hand()))["compute"] == "+--"


WITHOUT_DISK = 193
"""Its copies go to the host alone."""


@pytest.mark.slow(sample=5)
@pytest.mark.parametrize("seed", [WITHOUT_DISK, *range(18), *range(19, 60)])
def test_everything_adds_up_to_what_the_simulator_says(seed) -> None:
    rng = random.Random(seed)
    graph = residual(n_blocks=rng.randint(2, 5))
    schedule = random_copies(graph, baseline(graph), rng)
    places = random_places(rng)
    solution = planned(graph, schedule, places)
    found, simulation = copies(solution), solution.simulation
    busy_s = {s.name: s.busy_s for s in found.streams if s.name != "compute"}
    assert busy_s == pytest.approx(dict(simulation.busy_s))
    stalled_s = math.fsum(stall.time_s for stall in found.stalls)
    assert stalled_s == pytest.approx(simulation.stall_s, abs=1e-9 * found.end_s)
    assert found.end_s == simulation.time_s
    assert all(size_bytes >= 0 for _, size_bytes in found.host_bytes())
    assert found.host_bytes()[-1][1] == 0
    has_loads = any(s.name == "load" for s in found.streams)
    assert has_loads == (seed != WITHOUT_DISK)
    if not has_loads:
        assert max(size for _, size in found.host_bytes()) <= simulation.host_peak_bytes
    assert all(stall.time_s > 1e-12 * found.end_s for stall in found.stalls)
    for trip in found.trips:
        assert trip.from_s <= trip.until_s <= found.end_s
        assert trips_of(solution, [trip.storage])


def test_a_plan_without_copies_has_none() -> None:
    alone = planned(GRAPH, baseline(GRAPH), None)
    assert copies(alone) is None
    assert trips_of(alone, ["a"]) == ()
    assert copies(dataclasses.replace(alone, schedule=None, simulation=None)) is None
