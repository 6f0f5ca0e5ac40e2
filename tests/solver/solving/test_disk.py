"""A disk behind the host, from the front doors: sizes and rates, refusals, reports, files."""

import json
from pathlib import Path

import pytest

from checkpoint_solver.cli.command import main
from graphs.hardware import DISKS
from solver import solve
from solver.plan_analysis import copies
from solver.reporting.copy_rows import trip_table
from solver.schedule import Link, Place, Places, Solution
from solver.sizes_deadlines_progress import BudgetError, format_size
from solver.solving.disk import with_disk
from tests.support.budgets import baseline_peak_bytes
from tests.support.command import failed
from tests.support.synthetic_graphs import residual

NET = residual(n_blocks=5)
PEAK = baseline_peak_bytes(NET)
BUDGET = int(0.7 * PEAK)
HOST = Places(host=Place(PEAK // 10, Link(1e14, 1e14)))
FAST = {"host_budget": PEAK // 10, "host_link": 1e14}


def test_sizes_and_rates_as_people_write_them(tmp_path: Path) -> None:
    assert HOST.host is not None
    disk = Place(500 * 10**9, Link(5e9, 6e9))
    for budget in ("500GB", 5e11, 500 * 10**9):
        for rate in ("5GB/s,6GB/s", (5e9, 6e9), ["5GB/s", 6e9]):
            assert with_disk(HOST, budget, rate) == Places(HOST.host, disk)
    assert with_disk(HOST, f"500GB:{tmp_path}", "5GB/s, 6GB/s") == Places(
        HOST.host, disk, str(tmp_path)
    )
    assert with_disk(HOST, "500GB", 5e9) == Places(HOST.host, Place(5 * 10**11, Link(5e9, 5e9)))
    assert with_disk(HOST, None) == HOST
    assert with_disk(None, None) is None


@pytest.mark.parametrize(
    ("places", "budget", "rate", "message"),
    [
        (HOST, None, "5GB/s", "a rate of the disk is given .* but no disk"),
        (None, "500GB:/tmp", "5GB/s", "no host memory, through which every copy to it goes"),
        (HOST, "500GB:/tmp", None, "the disk's rates are unknown; measure them"),
        (HOST, "50%:/tmp", "5GB/s", "invalid disk budget '50%': write 64GB"),
        (HOST, "much:/tmp", "5GB/s", "invalid disk budget 'much'"),
        (HOST, "0GB", "5GB/s", "invalid disk budget '0GB': must be above zero"),
        (HOST, "500:/tmp", "5GB/s", "invalid disk budget '500': 500 bytes"),
        (HOST, "500GB:", "5GB/s", "no directory after the colon"),
        (HOST, "500GB:/nowhere/at/all", "5GB/s", "'/nowhere/at/all': no such directory"),
        (HOST, "500GB:/tmp", "5Gb/s", "invalid disk rate '5Gb/s': a lower-case b is for bits"),
        (HOST, "500GB:/tmp", "5GB/s,6gb", "invalid disk rate '6gb': a lower-case b is for bits"),
        (HOST, "500GB:/tmp", "nvme6", "invalid disk rate 'nvme6': a kind of disk .sata, nvme3, "),
        (HOST, "500GB:/tmp", "5", "invalid disk rate '5': 5 B/s"),
        (HOST, "500GB:/tmp", "1GB/s,2GB/s,3GB/s", "invalid disk rate .*: write 5GB/s, or OUT,IN"),
    ],
)
def test_what_is_wrong_is_said(places, budget, rate, message) -> None:
    with pytest.raises(BudgetError, match=message):
        with_disk(places, budget, rate, resident_bytes=10**9)


def test_rates_are_measured_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("solver.solving.disk.MEASURED_BYTES", 2**23)
    places = with_disk(HOST, f"500GB:{tmp_path}", "measured")
    assert min(places.disk.link.out_bytes_per_s, places.disk.link.in_bytes_per_s) > 1e5
    assert not any(tmp_path.iterdir())
    with pytest.raises(BudgetError, match="measured in its directory, and none is given"):
        with_disk(HOST, "500GB", "measured")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(BudgetError, match=r"cannot be measured .No space left on device."):
        with_disk(HOST, f"500GB:{tmp_path}", "measured")


def test_behind_a_host_with_room_for_all_the_host_alone_is_planned() -> None:
    options = {"budget": BUDGET, "host_budget": 2 * PEAK, "host_link": 1e9}
    alone = solve(NET, **options)
    behind = solve(NET, **options, disk_budget="500GB", disk_rate="nvme4")
    assert behind.request.places.disk is not None
    assert behind.schedule == alone.schedule
    assert behind.lower_bound_s == alone.lower_bound_s


def test_kinds_of_disk_have_published_rates() -> None:
    assert HOST.host is not None
    for name in ("nvme4", "NVMe 4"):
        places = with_disk(HOST, "500GB", name)
        assert places == Places(HOST.host, Place(500 * 10**9, Link(6.9e9, 7.45e9)))
    writes = [disk.write_bytes_per_s for disk in DISKS.values()]
    assert list(DISKS) == ["sata", "nvme3", "nvme4", "nvme5"]
    assert writes == sorted(writes)
    assert all(disk.read_bytes_per_s >= disk.write_bytes_per_s for disk in DISKS.values())


@pytest.mark.parametrize("rate", ["nvme4", "measured"])
def test_the_command_knows_rates_by_a_word(rate: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("solver.solving.disk.MEASURED_BYTES", 2**23)
    path = str(tmp_path / "graph.json")
    NET.save(path)
    host = ["--host", f"{PEAK // 10}B", "--host-link", "100TB/s"]
    disk = ["--disk", f"500GB:{tmp_path}", "--disk-rate", rate]
    assert main(["--budget", str(PEAK), *host, *disk, path]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("6.90 GB/s out, 7.45 GB/s in," in printed) == (rate == "nvme4")


def test_measured_costs_measure_the_disk(tmp_path: Path, monkeypatch) -> None:
    class MeasuredCosts:
        host_copies = None

    monkeypatch.setattr("solver.solving.disk.measured_rates", lambda _: (2e9, 3e9))
    places = with_disk(HOST, f"500GB:{tmp_path}", costs=MeasuredCosts())
    assert places.disk == Place(500 * 10**9, Link(2e9, 3e9))
    for budget, costs in (("500GB", MeasuredCosts()), (f"500GB:{tmp_path}", None)):
        with pytest.raises(BudgetError, match="the disk's rates are unknown"):
            with_disk(HOST, budget, costs=costs)


def test_a_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    message = "no file can be written there .Permission denied.; name another"
    with pytest.raises(BudgetError, match=message):
        with_disk(HOST, "500GB:/tmp", "5GB/s")


def test_what_the_host_has_no_room_for_goes_to_the_disk(tmp_path: Path) -> None:
    beside = solve(NET, budget=BUDGET, **FAST)
    behind = solve(NET, budget=BUDGET, **FAST, disk_budget=f"500GB:{tmp_path}", disk_rate="100TB/s")
    assert behind.simulation.time_s < beside.simulation.time_s - 1e-3 * NET.baseline_time_s
    assert behind.simulation.disk_peak_bytes > 0
    assert behind.simulation.host_peak_bytes <= PEAK // 10
    assert behind.lower_bound_s <= beside.lower_bound_s
    behind.save(tmp_path / "schedule.json")
    read = Solution.load(tmp_path / "schedule.json", graph=NET)
    assert read.simulation == behind.simulation
    assert read.request == behind.request
    assert read.request.places.disk_directory == str(tmp_path)


@pytest.mark.slow
def test_a_slow_disk_is_left_alone() -> None:
    beside = solve(NET, budget=BUDGET, **FAST)
    behind = solve(NET, budget=BUDGET, **FAST, disk_budget="500GB", disk_rate="1MB/s")
    assert behind.schedule == beside.schedule


@pytest.mark.slow
def test_the_command_says_what_is_on_the_disk(tmp_path: Path, capsys) -> None:
    path = str(tmp_path / "graph.json")
    NET.save(path)
    host = ["--host", f"{PEAK // 10}B", "--host-link", "100TB/s"]
    disk = ["--disk", f"500GB:{tmp_path}", "--disk-rate", "90TB/s,100TB/s"]
    options = ["--budget", str(BUDGET), *host, *disk]
    schedule, drawn = str(tmp_path / "schedule.json"), str(tmp_path / "p.svg")
    assert main([*options, "-o", schedule, "--plot", drawn, path]) == 0
    printed = capsys.readouterr().out
    assert "500.0 GB (465.66 GiB), 90.00 TB/s out, 100.0 TB/s in," in " ".join(printed.split())
    section = printed[printed.index("Copies to the host and the disk") :]
    assert "host to disk" in section
    assert "disk to host" in section
    assert "\n  on the disk" in section
    solution = Solution.load(schedule, graph=NET)
    assert " on the host, " in repr(solution)
    assert f"{format_size(solution.simulation.disk_peak_bytes)} on the disk; " in repr(solution)
    found = copies(solution)
    assert any("from the disk" in row for row in trip_table(found).rows)
    assert max(n for _, n in found.disk_bytes()) == solution.simulation.disk_peak_bytes
    assert max(n for _, n in found.host_bytes()) == solution.simulation.host_peak_bytes
    trip = next(trip for trip in found.trips if trip.to_disk_s)
    assert main(["explain", schedule, path, "--op", trip.maker.name]) == 0
    with_obstacle = capsys.readouterr().out
    assert "to the disk" in with_obstacle
    assert "from the disk" in with_obstacle
    assert main([*options, "--json", path]) == 0
    said = f'"disk_peak_bytes": {solution.simulation.disk_peak_bytes}'
    assert said in json.dumps(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--disk", "500GB", "--disk-rate", "5GB/s"], "--disk 500GB: name a directory"),
        (["--disk", "500GB:/tmp"], "the disk's rates are unknown"),
        (["--disk", "500:/tmp", "--disk-rate", "5GB/s"], "invalid disk budget '500': 500 bytes"),
        (["--disk-rate", "5GB/s"], "a rate of the disk is given ('5GB/s') but no disk"),
        (["--disk", "5GB:/tmp", "--disk-rate", "5Gb/s"], "a lower-case b is for bits"),
    ],
)
def test_the_command_refuses(options, message, tmp_path: Path, capsys) -> None:
    path = str(tmp_path / "graph.json")
    NET.save(path)
    host = ["--host", "64GB", "--host-link", "1GB/s"]
    assert message in failed(capsys, "--budget", str(BUDGET), *host, *options, path, code=2)


def test_the_command_refuses_a_disk_without_a_host(tmp_path: Path, capsys) -> None:
    path = str(tmp_path / "graph.json")
    NET.save(path)
    disk = ["--disk", "500GB:/tmp", "--disk-rate", "5GB/s"]
    line = failed(capsys, "--budget", str(BUDGET), *disk, path, code=2)
    assert "no host memory, through which every copy to it goes; give some (--host 8GB" in line
