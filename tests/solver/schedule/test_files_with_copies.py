"""Schedule files with copies: written, read, refused; what reports say of them."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from checkpoint_solver.cli.command import Exit, main
from graphs.files import FormatError
from graphs.graph import Graph
from solver import solve
from solver.plan_analysis.by_block import block_rows
from solver.plan_analysis.explain import peak, why_recomputed
from solver.schedule.host_and_disk import Link, Place, Places
from solver.schedule.memory import copied_out_for_backward, occupancy, saved_for_backward
from solver.schedule.ops import Schedule
from solver.schedule.recompute import keep
from solver.schedule.simulator import IllegalScheduleError, simulate
from solver.schedule.solution import Request, SavedSchedule, Solution
from tests.support.damaged_json import damaged
from tests.support.paths import DATA
from tests.support.schedules_with_copies import Gap, copy_away, unused_gaps

STEP = DATA / "small_step.json"
LINK = Link(out_bytes_per_s=5e10, in_bytes_per_s=6e10, latency_s=1e-6)
PLACES = Places(host=Place(10**9, LINK), disk=Place(10**12, Link(6e9, 7e9)))


def longest(graph: Graph, schedule: Schedule, n: int) -> list[Gap]:
    found = sorted(unused_gaps(graph, schedule), key=lambda gap: gap.start - gap.stop)
    return sorted(found[:n], key=lambda gap: gap.stop)


@pytest.fixture(scope="module")
def copied() -> Solution:
    """A plan that recomputes and has three storages away between forward and backward pass."""
    graph = Graph.load(STEP)
    solution = solve(graph, budget="1TB")
    roots = sorted({graph.root(name) for name in graph.producer})
    schedule = keep(graph, roots[::2])
    schedule = copy_away(graph, schedule, longest(graph, schedule, 3))
    return dataclasses.replace(
        solution,
        schedule=schedule,
        simulation=simulate(graph, schedule, places=PLACES),
        request=dataclasses.replace(solution.request, places=PLACES),
    )


def test_a_plan_with_copies_comes_back(copied: Solution, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    copied.save(path)
    again = Solution.load(path, graph=STEP)
    assert (again.schedule, again.simulation) == (copied.schedule, copied.simulation)
    assert again.request == copied.request
    value = json.loads(path.read_text())
    assert value["request"]["places"] == {
        "host": {
            "capacity_bytes": 10**9,
            "link": {"out_bytes_per_s": 5e10, "in_bytes_per_s": 6e10, "latency_s": 1e-6},
        },
        "disk": {
            "capacity_bytes": 10**12,
            "link": {"out_bytes_per_s": 6e9, "in_bytes_per_s": 7e9, "latency_s": 0.0},
        },
    }
    assert value["host_peak_bytes"] == copied.simulation.host_peak_bytes > 0
    assert {word for word, _ in value["ops"]} == {"compute", "free", "store", "fetch", "drop"}


def test_without_copies_the_file_says_nothing_of_them(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    solve(STEP, budget="1TB").save(path)
    value = json.loads(path.read_text())
    assert list(value["request"]) == [
        *("budget_bytes", "reserve_bytes", "method", "time_limit_s", "seed", "rewrites"),
        "budget_of",
    ]
    assert not {"host_peak_bytes", "disk_peak_bytes", "stall_s"} & value.keys()


WRONG: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "places": (("places",), 3, r"request: field 'places' is 3; expected an object"),
    "host": (("places", "host"), [], r"places: host: expected an object"),
    "capacity": (("places", "host", "capacity_bytes"), -1, "'capacity_bytes' is -1"),
    "nothing": (("places", "host", "capacity_bytes"), 0, "capacity_bytes of a place is 0"),
    "no link": (("places", "host", "link"), None, "host: field 'link' is missing"),
    "rate": (("places", "disk", "link", "in_bytes_per_s"), 0, "in_bytes_per_s of a link is 0"),
    "latency": (("places", "host", "link", "latency_s"), "1", "field 'latency_s' is '1'"),
    "no host": (("places", "host"), None, "places have a disk and no host"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_places_are_named(copied: Solution, tmp_path: Path, case: str) -> None:
    keys, odd, message = WRONG[case]
    path = tmp_path / "schedule.json"
    copied.save(path)
    value = json.loads(path.read_text())
    inside = value["request"]
    for key in keys[:-1]:
        inside = inside[key]
    if odd is None:
        del inside[keys[-1]]
    else:
        inside[keys[-1]] = odd
    path.write_text(json.dumps(value))
    with pytest.raises(FormatError, match=message):
        SavedSchedule.load(path)


def test_what_does_not_fit_is_refused(copied: Solution, tmp_path: Path) -> None:
    n_bytes = copied.simulation.host_peak_bytes
    path = tmp_path / "schedule.json"
    for capacity_bytes in (n_bytes, n_bytes - 1):
        places = Places(host=Place(capacity_bytes, LINK))
        request = dataclasses.replace(copied.request, places=places)
        dataclasses.replace(copied, request=request).save(path)
        if capacity_bytes == n_bytes:
            Solution.load(path, graph=STEP)
    with pytest.raises(IllegalScheduleError, match=f"the peak on the host is {n_bytes} bytes"):
        Solution.load(path, graph=STEP)
    request = dataclasses.replace(copied.request, places=None)
    dataclasses.replace(copied, request=request).save(path)
    with pytest.raises(IllegalScheduleError, match="no host is given"):
        Solution.load(path, graph=STEP)


def test_a_request_says_what_is_too_much(copied: Solution) -> None:
    assert copied.simulation is not None
    of = dataclasses.replace
    request = Request(10, places=Places(host=Place(5, LINK), disk=Place(7, LINK)))
    fits = of(copied.simulation, peak_bytes=10, host_peak_bytes=5, disk_peak_bytes=7)
    assert not request.excess(fits)
    assert "the peak is 11 bytes, above the 10" in request.excess(of(fits, peak_bytes=11))
    assert "on the host is 6 bytes, above the 5" in request.excess(of(fits, host_peak_bytes=6))
    assert "on the disk is 8 bytes, above the 7" in request.excess(of(fits, disk_peak_bytes=8))


def test_analysis_knows_copies(copied: Solution) -> None:
    graph, schedule, simulation = copied.graph, copied.schedule, copied.simulation
    found = occupancy(graph, schedule, places=PLACES)
    assert found.edges_s[-1] == pytest.approx(simulation.time_s)
    assert max(found.total_bytes) <= simulation.peak_bytes
    away_then = copied_out_for_backward(graph, schedule) - saved_for_backward(graph, schedule)
    assert away_then
    away_bytes = sum(graph.tensor_by_name[name].size_bytes for name in away_then)
    without = dataclasses.replace(copied, schedule=solve(graph, budget="1TB").schedule)
    kept_bytes = sum(row.kept_bytes + row.dropped_bytes for row in block_rows(copied))
    assert kept_bytes + away_bytes == sum(row.kept_bytes for row in block_rows(without))
    assert peak(copied).n_ops == len(schedule.order)
    for node in graph.forward_nodes:
        assert why_recomputed(copied, node.name).kept is None


def test_the_command_explains_and_draws_copies(
    copied: Solution, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.json"
    copied.save(path)
    assert main(["explain", str(path), str(STEP)]) == Exit.SOLVED
    order = copied.schedule.order
    name = next(name for name in order if order.count(name) > 1)
    assert main(["explain", str(path), str(STEP), "--op", name]) == Exit.SOLVED
    assert "not worked out for a plan with copies" in capsys.readouterr().out


@pytest.mark.slow
def test_files_of_strangers(copied: Solution, tmp_path: Path) -> None:
    """Each is refused with a typed error or comes back as it was."""
    path = tmp_path / "schedule.json"
    copied.save(path)
    good, n_read = path.read_text(), 0
    for seed in range(1500):
        path.write_bytes(damaged(good, random.Random(f"copies {seed}")))
        try:
            solution = Solution.load(path, graph=copied.graph)
        except (FormatError, IllegalScheduleError):
            continue
        n_read += 1
        solution.save(path)
        assert Solution.load(path, graph=copied.graph) == solution
    assert 75 < n_read < 900
