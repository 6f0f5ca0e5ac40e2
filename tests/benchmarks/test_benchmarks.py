"""The benchmarks' own arithmetic, on graphs small enough for a test. Nothing here is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import (
    derivatives,
    harness,
    offload,
    peers,
    plan_quality,
    plan_quality_tables,
    step_time,
)
from benchmarks.zoo.graphs import capture_step
from graphs.synthetic.nets import residual
from scheduler_runtime import apply
from solver import solve
from tests.support.paths import ROOT


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(torch.tanh(layer(x)))
        return x.square().mean()


class Classifier(nn.Module):
    """Wide logits: its loss can run in row chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 8192, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), targets)


@pytest.mark.slow
def test_a_report_has_a_row_for_each_share_and_lists_its_misses() -> None:
    graph = residual(n_blocks=5)
    found = plan_quality.measure_graph("net", graph, shares=(0.8, 0.5, 0.0), time_limit_s=600)
    assert [row["share"] for row in found["rows"]] == [0.8, 0.5, 0.0]
    generous = found["rows"][0]
    assert generous["none"]["peak_bytes"] <= generous["budget_bytes"]
    assert generous["none"]["bound"] - 1e-9 <= generous["none"]["overhead"]
    missed = plan_quality_tables.misses_target
    assert not missed(generous["none"], share=0.8)
    assert missed({"gap": 0.002}, share=0.8)
    assert not missed({"gap": 0.002}, share=0.4)
    assert missed({"gap": None}, share=0.4)
    report = {"circumstances": harness.circumstances(5.0), "graphs": {"gpt2": found}}
    text = plan_quality_tables.markdown(report)
    assert "| GPT-2 small | " in text
    assert "## gpt2" in text
    assert "Worse with rewrites: 0 of 0: none." in text


@pytest.mark.slow
def test_plans_with_rewrites_stand_beside_those_without_and_earlier_ones() -> None:
    with torch.device("meta"):
        model = Classifier()
        batch = torch.empty(2048, 64), torch.empty(2048, dtype=torch.int64)
    step = capture_step(model, batch)
    about = {"shares": (0.3,), "time_limit_s": 600}
    first = plan_quality.measure_graph("net", step, **about)
    assert first["least"]["bitwise"]["reached_bytes"] < first["least"]["none"]["reached_bytes"]
    for row in first["rows"]:
        assert row["bitwise"]["peak_bytes"] <= row["budget_bytes"]
        assert row["bitwise"]["rewrites"]
        assert row["bitwise"]["overhead"] <= row["none"]["overhead"] + 1e-9
    assert {"every_block", "torch ilp"} <= set(first["rows"][0]["others"])

    first["rows"][0]["others"]["torch ilp"] = 123.0  # taken over where the step is the same
    first["range_from_bytes"] += 1000
    again = plan_quality.measure_graph("net", step, before=first, **about)
    assert again["range_from_bytes"] == first["range_from_bytes"]
    assert again["rows"][0]["others"]["torch ilp"] == 123.0
    first["rows"][0]["others"]["every_block"] = 0.1  # as of another step
    again = plan_quality.measure_graph("net", step, before=first, **about)
    assert again["rows"][0]["others"]["torch ilp"] != 123.0

    worse_than = plan_quality_tables.worse_than
    assert worse_than({"net": first}, {"net": again}, names=["net"]) == []
    again["rows"][0]["bitwise"]["overhead"] += 0.001
    (worse,) = worse_than({"net": first}, {"net": again}, names=["net"])
    assert worse.startswith("net at 0.3, bitwise: ")
    assert worse_than({}, {"net": again}, names=["net"]) == []
    again["rows"][0]["bitwise"]["overhead"] = again["rows"][0]["none"]["overhead"] + 0.001
    report = {"circumstances": harness.circumstances(5.0), "graphs": {"net": again}}
    assert "Worse with rewrites: 1 of 1: net at 0.3" in plan_quality_tables.markdown(report)
    report["graphs"] = {"gpt2": again}  # in the table, with a part of its shares
    assert f"| {chr(0x2013)} | {chr(0x2013)} |" in plan_quality_tables.markdown(report)
    del again["rows"][0]["bitwise"]  # as at a share that was measured without rewrites only
    text = plan_quality_tables.markdown(report)
    assert "Worse with rewrites: 0 of 0: none." in text
    assert " |  |  |  |  |  | " in text


@pytest.mark.slow
def test_what_pytorchs_partitioner_saves_is_simulated() -> None:
    with torch.device("meta"):
        model, batch = Tower(), torch.empty(256, 64)
    step = capture_step(model, batch)
    found = peers.simulate_partitions(step, time_limit_s=600.0)
    assert set(found) == {"torch dp", "torch greedy", "torch ilp"}
    for simulations in found.values():
        assert len(simulations) == len(peers.RATIOS)
        assert any(simulation.n_recomputed for simulation in simulations)
        roomy = peers.best_overhead(step.graph, simulations, budget_bytes=10**9)
        tight = peers.best_overhead(
            step.graph, simulations, budget_bytes=min(s.peak_bytes for s in simulations)
        )
        assert 0.0 <= roomy <= tight
        assert peers.best_overhead(step.graph, simulations, budget_bytes=1) is None


@pytest.mark.slow
def test_offload_measures_and_names_its_misses() -> None:
    graph = residual(n_blocks=6)
    found = offload.measure_graph("net", graph, shares=[0.5], time_limit_s=600.0)
    (row,) = found["rows"]
    assert 0.0 <= row["both_450"]["bound"] <= row["both_450"]["overhead"] + 1e-9
    assert row["both_450"]["overhead"] <= row["recompute"]["overhead"] + 1e-3
    report = {"circumstances": harness.circumstances(60.0), "graphs": {"net": found}}
    row["both_25"]["gap"], row["both_50"]["gap"], row["both_450"]["gap"] = 0.001, 0.002, 0.0
    assert [text for text in offload.missed_targets(report) if "gap" in text] == [
        "net at 0.5, 50 GB/s: gap 0.20, target 0.10"
    ]
    assert [offload.target_gap("unet", share) for share in (0.2, 0.1)] == [0.005, 0.03]
    row["recompute"]["overhead"], row["both_25"]["overhead"] = 0.04, 0.03
    row["both_50"]["overhead"] = row["both_450"]["overhead"] = 0.25
    found |= {"resident_bytes": 100, "baseline_peak_bytes": 400}
    row["budget_bytes"] = 200
    last = offload.gains_table(report).splitlines()[-1].split(" | ")
    assert (last[1], last[4], last[5], last[6]) == ("25 %", "3.0 times", "3.0 times", "")
    assert "Misses: " in offload.markdown(report)


@pytest.mark.slow
def test_steps_take_turns_and_a_plan_is_forecast_with_other_times() -> None:
    model, batch = Tower(), (torch.randn(128, 64),)
    found = solve(model, batch, budget="350KB", rewrites="none")
    assert found.simulation.n_recomputed > 0
    assert step_time._forecast(found, found) == pytest.approx(found.overhead)
    sides = {"": Tower(), "plan": apply(model, found)}
    used = step_time.measure_rounds(sides, batch, n_rounds=2)
    assert [len(times_s) for times_s in used.values()] == [2, 2]


def test_a_command_names_files_of_one_machine_without_their_folders(monkeypatch):
    words = [
        "/somewhere/allocator/__main__.py",
        "--wheel",
        "/somewhere/torch.whl",
        "--out",
        "b/a.json",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert harness.command() == "python -m benchmarks.allocator --wheel torch.whl --out b/a.json"


def test_installed_files_are_named_from_their_package_on() -> None:
    place = Path(sys.prefix, "site-packages", "package", "file.py")
    words = f"reads values ({place}, line 3)"
    assert harness.without_folders(words) == "reads values (package/file.py, line 3)"


def test_figures_that_could_not_be_written_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = harness.parser("name", None)
    for path, why in (
        (tmp_path / "none" / "a.json", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path, f"{tmp_path} is a folder"),
    ):
        with pytest.raises(SystemExit):
            given.parse_args(["--out", str(path)])
        assert why in capsys.readouterr().err
    assert given.parse_args(["--out", str(tmp_path / "a.json")]).out == tmp_path / "a.json"


def test_the_page_on_derivatives_has_the_measured_figures_and_no_plan_has_a_fault() -> None:
    report = json.loads((ROOT / "benchmarks/results/derivatives.json").read_text())
    assert derivatives.markdown(report) in (ROOT / "docs/derivatives.md").read_text()
    rows = [row for rows in report["models"].values() for row in rows]
    assert not any(map(derivatives._faults, rows))
    above = {**rows[2], "measured_peak_bytes": rows[2]["predicted_peak_bytes"] + 1}
    assert derivatives._faults({**above, "is_identical": False}) == [
        "other bits",
        "above the prediction",
    ]
