"""The published methods for several levels of storage, on graphs with a host and a disk."""

from __future__ import annotations

import pytest

from checkpoint_solver.cli.command import main
from graphs.graph import Graph
from solver import solve
from solver.methods import METHODS, auto_method, storage_levels
from solver.methods.proposal import Proposal
from solver.schedule import Link, Place, Places, Schedule, Spill, simulate
from tests.support import synthetic_graphs
from tests.support.brute_force_copies import HostLink, TooManyStatesError, fastest
from tests.support.budgets import baseline_peak_bytes, budget_above_resident
from tests.support.command import failed
from tests.support.overwriting import overwriting_dag
from tests.support.small_graphs import random_step, uniform_chain

NAMES = [name for name, method in METHODS.items() if method.needs_places]


def places(host_bytes: int, out_s: float, disk_bytes: int = 0, disk_s: float = 1.0) -> Places:
    """Seconds for a byte."""
    disk = Place(disk_bytes, Link(1 / disk_s, 1 / disk_s)) if disk_bytes else None
    return Places(Place(host_bytes, Link(1 / out_s, 1 / out_s)), disk)


def run(name: str, graph: Graph, budget_bytes: int, beside: Places | None):
    """The simulation of what is proposed, which has to fit; None: nothing."""
    proposal = METHODS[name](
        graph, budget_bytes=budget_bytes, time_limit_s=600, seed=0, places=beside
    )
    if proposal.schedule is None:
        return None
    simulation = simulate(graph, proposal.schedule, places=beside)
    assert simulation.peak_bytes <= budget_bytes
    assert simulation.host_peak_bytes <= (beside or Places()).host_bytes
    assert simulation.disk_peak_bytes <= (beside or Places()).disk_bytes
    return simulation


def test_the_names() -> None:
    assert NAMES == ["disk_revolve", "periodic_disk_revolve", "hrevolve", "multistage"]


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_long_chain_of_equal_steps(name: str) -> None:
    """Forty unit tensors within five bytes, of which one recomputes most without a slow level."""
    graph = uniform_chain(40)
    alone = run("revolve", graph, 5, None)
    beside = run(name, graph, 5, places(40, 2.0))
    assert alone.time_s > 2.9 * graph.baseline_time_s
    assert beside.time_s < 2.4 * graph.baseline_time_s
    assert beside.host_peak_bytes > 0
    behind = run(name, graph, 5, places(4, 2.0, 100, 3.0))
    assert behind.time_s < alone.time_s
    if name != "hrevolve":
        assert behind.disk_peak_bytes > 0


def test_copies_beside_the_computation_cost_no_more_than_published() -> None:
    """The published cost counts every copy as if nothing were computed meanwhile."""
    from solver.chain import Level, cost_of, disk_revolve

    graph = uniform_chain(40)
    beside = run("disk_revolve", graph, 5, places(40, 2.0))
    memory, slow = Level(1), Level(40, 2.0, 2.0)
    published = cost_of(disk_revolve(n_steps=40, levels=(memory, slow)), (memory, slow))
    assert beside.time_s - graph.baseline_time_s <= published


@pytest.mark.parametrize("name", NAMES)
def test_without_places_it_is_revolve(name: str) -> None:
    graph = uniform_chain(24)
    for budget_bytes in (6, 9, 14):
        assert run(name, graph, budget_bytes, None).time_s == pytest.approx(
            run("revolve", graph, budget_bytes, None).time_s
        )


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", range(4))
def test_on_any_graph_what_is_proposed_is_legal_and_fits(name: str, block: int) -> None:
    for seed in range(12 * block, 12 * block + 12):
        graph = random_step(seed, n_forward=seed % 12 + 2, n_later=seed % 7 + 2)
        peak_bytes = baseline_peak_bytes(graph)
        per_byte_s = (graph.baseline_time_s or 1.0) / (peak_bytes or 1)
        beside = places(max(1, peak_bytes // 3), per_byte_s, max(1, peak_bytes), per_byte_s)
        for share in (0.9, 0.6):
            extra = int(share * (peak_bytes - graph.resident_bytes))
            run(name, graph, graph.resident_bytes + extra, beside)


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("n_blocks", [2, 3])
def test_no_method_beats_the_truth_on_small_chains(n_blocks: int) -> None:
    graph = uniform_chain(n_blocks)
    for budget_bytes in (3, 4):
        host, disk = HostLink(1, 0.5, 0.5), HostLink(4, 0.5, 0.5)
        beside = places(1, 0.5, 4, 0.5)
        try:
            truth = fastest(
                graph, budget_bytes=budget_bytes, host=host, disk=disk, max_labels=20_000
            )
        except TooManyStatesError:
            continue
        for name in (*NAMES, "auto"):
            simulation = run(name, graph, budget_bytes, beside)
            assert simulation is None or simulation.time_s >= truth.time_s - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("beside", [places(16, 2.0), places(4, 2.0, 100, 3.0)])
def test_auto_is_no_worse_on_chains(beside: Places) -> None:
    graph = uniform_chain(16)
    found = run("auto", graph, 4, beside)
    for name in ("hrevolve", "disk_revolve"):
        assert found.time_s <= run(name, graph, 4, beside).time_s


def test_auto_schedules_the_same_reversal_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host has room for all and there is no disk, the two methods are the same."""
    tried: list[object] = []
    scheduled = storage_levels._make_schedule

    def counted(search: object, blocks: object, actions: object, *rest: object) -> Schedule:
        tried.append(actions)
        return scheduled(search, blocks, actions, *rest)

    monkeypatch.setattr(storage_levels, "_make_schedule", counted)
    monkeypatch.setattr(
        auto_method, "recompute_and_copy", lambda *_given, **_options: Proposal(None)
    )
    assert run("auto", uniform_chain(16), 4, places(16, 2.0)) is not None
    assert tried
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize("name", NAMES)
def test_a_disk_that_is_smaller_than_any_snapshot(name: str) -> None:
    run(name, overwriting_dag(50105), 11, places(6, 0.25, 1, 0.25))


@pytest.mark.slow
def test_the_front_doors(tmp_path, capsys) -> None:
    graph = synthetic_graphs.chain(n_blocks=24)
    budget_bytes = budget_above_resident(graph, 0.2)
    with pytest.raises(ValueError, match=r"hrevolve is for host memory and disks .* host_budget"):
        solve(graph, budget=budget_bytes, method="hrevolve")
    options = {"host_budget": 8000, "host_link": 1e6, "disk_budget": 10**6, "disk_rate": 1e6}
    solution = solve(graph, budget=budget_bytes, method="disk_revolve", **options)
    assert solution.schedule is not None
    assert solution.lower_bound_s <= solution.simulation.time_s
    path = str(tmp_path / "graph.json")
    graph.save(path)
    budget = ["--budget", str(budget_bytes)]
    line = failed(capsys, *budget, "--method", "multistage", path, code=2)
    assert "--method multistage is for host memory and disks" in line
    host = ["--host", "8000B", "--host-link", "1MB/s"]
    disk = ["--disk", f"1MB:{tmp_path}", "--disk-rate", "1MB/s"]
    assert main([*budget, "--method", "periodic_disk_revolve", *host, *disk, path]) == 0
    capsys.readouterr()
    assert main([*budget, "--compare", "--time-limit", "60", *host, *disk, path]) == 0
    printed = capsys.readouterr().out
    for name in ("auto", *NAMES):
        assert f"\n  {name}" in printed
    assert "\n  sqrt" not in printed


def test_a_snapshot_on_the_disk_goes_there_in_the_schedule() -> None:
    graph = uniform_chain(40)
    proposal = METHODS["disk_revolve"](
        graph, budget_bytes=5, time_limit_s=600, seed=0, places=places(4, 2.0, 100, 3.0)
    )
    assert any(isinstance(op, Spill) for op in proposal.schedule.ops)
