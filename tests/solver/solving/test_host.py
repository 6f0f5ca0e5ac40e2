"""A host beside the device, from the front doors: sizes and links, refusals, reports, files."""

import pytest

from checkpoint_solver.cli.command import main
from graphs.hardware import HostCopies, named
from solver import solve, sweep
from solver.device_and_costs import host_places
from solver.plan_analysis import copies
from solver.reporting.copy_rows import N_TRIPS
from solver.schedule import Link, Place, Places, Solution
from solver.sizes_deadlines_progress import BudgetError, describe_op, format_size
from tests.support.budgets import baseline_peak_bytes
from tests.support.command import failed, json_of
from tests.support.small_graphs import make, op
from tests.support.synthetic_graphs import residual

NET = residual(n_blocks=8)
BUDGET = int(0.7 * baseline_peak_bytes(NET))


def test_sizes_and_rates_as_people_write_them() -> None:
    both = Places(host=Place(64 * 10**9, Link(50e9, 50e9)))
    links = "50GB/s", "50 GB/s", "50GB", "50GB/s,50GB/s"
    for link in (*links, 50e9, (50e9, 50e9), ["50GB/s", 5e10]):
        assert host_places("64GB", link, hardware=None) == both
    for link in ("50GB/s, 40GB/s", ("50GB/s", 40e9)):
        unequal = host_places("1GiB", link, hardware=None)
        assert unequal == Places(host=Place(2**30, Link(50e9, 40e9)))
    assert host_places(0.5 * (2**31 + 1), 50e9, hardware=None) == host_places(
        2**30, 50e9, hardware=None
    )
    assert host_places("64GB", hardware=named("h100")) == Places(
        host=Place(64 * 10**9, Link(55.2e9, 55.4e9, 6e-6))
    )
    assert host_places("64GB", "50GB/s", hardware=named("h100")) == Places(
        host=Place(64 * 10**9, Link(50e9, 50e9, 6e-6))
    )
    assert host_places(None, hardware=named("h100")) is None


@pytest.mark.parametrize(
    ("budget", "link", "message"),
    [
        (None, "50GB/s", "a link to the host is given .* and no host memory"),
        ("64GB", None, "the rate of the link to the host is unknown; give it"),
        ("64%", "50GB/s", "invalid host budget '64%': write 64GB"),
        ("much", "50GB/s", "invalid host budget 'much'"),
        ("0GB", "50GB/s", "invalid host budget '0GB': must be above zero"),
        ("64", "50GB/s", "invalid host budget '64': 64 bytes, .* write 64GB for gigabytes"),
        ("64GB", "50Gb/s", "invalid host link '50Gb/s': a lower-case b is for bits; write 50GB/s"),
        ("64GB", "50GB/s,40gb", "invalid host link '40gb': a lower-case b is for bits"),
        ("64GB", "fast", "invalid host link 'fast': write 50GB/s"),
        ("64GB", "0GB/s", "invalid host link '0GB/s': write 50GB/s"),
        ("64GB", "10%", "invalid host link '10%': write 50GB/s"),
        ("64GB", "/s", "invalid host link '/s': write 50GB/s"),
        ("64GB", "", "invalid host link '': write 50GB/s"),
        ("64GB", (1e9, 2e9, 3e9), "invalid host link .*: write 50GB/s, or OUT,IN"),
        ("64GB", (), r"invalid host link \(\): write 50GB/s, or OUT,IN"),
        ("64GB", {"out": 1e9}, "invalid host link .*: write 50GB/s"),
        ("64GB", "50", "invalid host link '50': 50 B/s, and no link is slower .*; write 50GB/s"),
        ("64GB", (50, 50e9), "invalid host link 50: 50 B/s"),
        ("64GB", "50GB/s,50KB/s", "invalid host link '50KB/s': 50.00 KB/s"),
        ("64GB", float("nan"), "invalid host link nan: write 50GB/s"),
        (float("inf"), "50GB/s", "invalid host budget inf: not a finite number"),
        (0.5, "50GB/s", r"invalid host budget 0.5: less than a byte; .* write 0.5 \* its bytes"),
        ("64GB", "1GB/s,2GB/s,3GB/s", "invalid host link .*: write 50GB/s, or OUT,IN"),
    ],
)
def test_what_is_wrong_is_said(budget, link, message) -> None:
    with pytest.raises(BudgetError, match=message):
        host_places(budget, link, hardware=None, resident_bytes=10**9)


def test_no_more_than_the_memory_of_a_superchip() -> None:
    assert host_places("480GB", hardware=named("gh200")) is not None
    with pytest.raises(BudgetError, match=r"'500GB': the host of this device has 480\.0 GB"):
        host_places("500GB", hardware=named("gh200"))


@pytest.mark.slow
def test_costs_that_know_the_link_say_it(monkeypatch) -> None:
    """Measured costs measure it; not where the link is given."""
    copies = HostCopies(4e9, 3e9, 2e-6, "measured")
    measured_on = []
    monkeypatch.setattr(
        "graphs.costs.models.measured_host_copies",
        lambda device: measured_on.append(str(device)) or copies,
    )
    torch = pytest.importorskip("torch")
    model, batch = torch.nn.Linear(4, 4), torch.ones(3, 4)
    options = {"loss": lambda output, _: output.sum(), "budget": "1GB", "host_budget": "1GB"}
    for kind in ({"costs": "measured"}, {"costs": "measured", "device": "cpu"}):
        solution = solve(model, batch, **options, **kind)
        assert solution.request.places == Places(host=Place(10**9, Link(4e9, 3e9, 2e-6)))
    assert measured_on == ["cpu", "cpu"]
    solution = solve(model, batch, **options, costs="measured", host_link="1GB/s")
    assert solution.request.places == Places(host=Place(10**9, Link(1e9, 1e9)))
    solution = solve(model, batch, **options)
    assert solution.request.places == Places(host=Place(10**9, Link(1e10, 1e10)))
    assert measured_on == ["cpu", "cpu"]


def test_a_host_of_bytes_where_gigabytes_were_meant(tmp_path, capsys) -> None:
    graph = make([op("f", "x", "y")], {"x": 10**9, "y": 1}, outputs="y")
    with pytest.raises(BudgetError, match="invalid host budget '64': 64 bytes"):
        solve(graph, budget="16GB", host_budget="64", host_link="50GB/s")
    graph.save(tmp_path / "graph.json")
    options = ["--budget", "16GB", "--host", "64", "--host-link", "50GB/s"]
    line = failed(capsys, *options, str(tmp_path / "graph.json"), code=2)
    assert "invalid host budget '64': 64 bytes" in line
    assert host_places(1024, 5e10, hardware=None, resident_bytes=10**9) == host_places(
        "1024B", 5e10, hardware=None, resident_bytes=10**9
    )


def test_only_auto_copies() -> None:
    with pytest.raises(ValueError, match="method sqrt copies nothing to the host; leave out host"):
        solve(NET, budget=BUDGET, method="sqrt", host_budget="64GB", host_link="50GB/s")


def test_less_is_lost_with_a_host_and_the_file_keeps_it(tmp_path) -> None:
    alone = solve(NET, budget=BUDGET)
    beside = solve(NET, budget=BUDGET, host_budget="64TB", host_link="1TB/s")
    assert beside.overhead < alone.overhead - 1e-3
    assert beside.schedule.has_copies
    beside.save(tmp_path / "schedule.json")
    read = Solution.load(tmp_path / "schedule.json", graph=NET)
    assert read.simulation == beside.simulation
    assert read.request == beside.request


def test_other_budgets_are_planned_with_the_host() -> None:
    beside = solve(NET, budget=BUDGET, host_budget="64TB", host_link="1TB/s")
    curve = sweep(beside, budgets=[BUDGET + 10**6])
    assert {point.request.places for point in curve.points} == {beside.request.places}
    for point in curve.points:
        assert point.lower_bound_s <= point.simulation.time_s + 1e-9


def test_a_budget_that_only_copies_can_meet() -> None:
    # f1 runs once, so x or y waits for the end beside big: 4 + 9 bytes, unless one is on the host.
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
    assert solve(graph, budget=12).proven_infeasible
    beside = solve(graph, budget=12, host_budget=100, host_link=1e6)
    assert beside.schedule.has_copies
    below = solve(graph, budget=9, host_budget=100, host_link=1e6)
    assert below.proven_infeasible
    assert below.obstacle.proven_bytes == 10


def test_the_command_reports_host_and_copies(tmp_path, capsys) -> None:
    path = str(tmp_path / "graph.json")
    NET.save(path)
    options = ["--budget", str(BUDGET), "--host", "64TB", "--host-link", "1TB/s,2TB/s"]
    assert main([*options, path]) == 0
    printed = capsys.readouterr().out
    assert "64.00 TB (58.21 TiB), 1.00 TB/s out, 2.00 TB/s in" in printed
    assert "not hidden" in printed
    assert main([*options, "--json", path]) == 0
    assert '"host_peak_bytes":' in capsys.readouterr().out


@pytest.mark.slow
def test_the_report_shows_the_streams(tmp_path, capsys) -> None:
    path, page = str(tmp_path / "graph.json"), tmp_path / "page.html"
    NET.save(path)
    options = ["--budget", str(BUDGET), "--host", "64TB", "--host-link", "1TB/s,2TB/s"]
    assert main([*options, "--report", str(page), "--plot", str(tmp_path / "p.svg"), path]) == 0
    printed = capsys.readouterr().out
    section = printed[printed.index("Copies to the host") :]
    for word in ("compute", "out", "in", "waiting", "on the host", "a column is"):
        assert f"\n  {word}" in section or f" {word} " in section
    solution = solve(NET, budget=BUDGET, host_budget="64TB", host_link="1TB/s,2TB/s")
    found = copies(solution)
    text = page.read_text()
    assert "<h2>Copies to the host</h2>" in text
    for stream in found.streams:
        assert f"{100 * stream.share:.0f} % busy" in text
        assert f"{100 * stream.share:.1f} %" in section
    assert f"at most {format_size(solution.simulation.host_peak_bytes)}" in text
    assert all(trip.storage in text for trip in found.trips[:N_TRIPS])


def test_explaining_a_plan_with_copies(tmp_path, capsys) -> None:
    solution = solve(NET, budget=BUDGET, host_budget="64TB", host_link="1TB/s")
    solution.save(tmp_path / "s.json")
    solution.graph.save(tmp_path / "g.json")
    trip = copies(solution).trips[0]
    files = [str(tmp_path / "s.json"), str(tmp_path / "g.json")]
    assert main(["explain", *files, "--op", trip.maker.name]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Copies to the host on the host at most " in text
    assert f"{describe_op(trip.maker)}, back for {trip.reader.name}" in text
    assert f"copied out {format_size(trip.size_bytes)}, in " in text
    assert f"on, for {describe_op(trip.reader)}" in text
    (first, *_) = json_of(capsys, "explain", *files)["copies"]
    assert first["storage"] == trip.storage
    assert tuple(first["out_s"]) == trip.out_s


def test_the_command_says_that_copies_do_not_help(tmp_path, capsys) -> None:
    path = str(tmp_path / "graph.json")
    NET.save(path)
    assert main(["--budget", str(BUDGET), "--host", "64GB", "--host-link", "1MB/s", path]) == 0
    assert "on the host         nothing; " in capsys.readouterr().out


def test_the_command_refuses_what_copies_nothing(tmp_path, capsys) -> None:
    path = str(tmp_path / "graph.json")
    NET.save(path)
    options = ["--budget", str(BUDGET), "--host", "64GB", "--host-link", "1GB/s", path]
    line = failed(capsys, "--method=sqrt", *options, code=2)
    assert line == (
        "solve: --host: method sqrt copies nothing to the host; leave out --method, or name one of "
        "auto, disk_revolve, periodic_disk_revolve, hrevolve, multistage"
    )
    line = failed(capsys, "--emit", "megatron", *options, code=2)
    assert "other systems have no setting for copies" in line
