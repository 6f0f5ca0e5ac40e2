"""The command `solve` on graph files, mostly in this process: what it prints, writes, returns."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from pathlib import Path

import pytest

import checkpoint_solver.cli
import checkpoint_solver.cli.arguments
from checkpoint_solver.cli.command import main
from graphs.graph import Graph
from graphs.synthetic.nets import residual
from solver.bound import StorageGraph
from solver.methods.ilp_variables import TooLargeError
from solver.methods.proposal import Method, Proposal
from solver.methods.registry import METHODS
from solver.schedule.recompute import baseline
from solver.schedule.solution import Solution
from tests.support.budgets import baseline_peak_bytes
from tests.support.command import failed, json_of, without_progress
from tests.support.paths import GPT2 as GPT2_PATH

GPT2 = str(GPT2_PATH)


# A plan for a graph file.


def test_the_report_of_a_graph_file(capsys):
    assert main(["--budget", "4GB", GPT2]) == 0
    printed = capsys.readouterr()
    assert without_progress(printed.err) == ""
    for words in (
        "364 ops, 128 of them forward",
        "4.00 GB (3.73 GiB)",
        "baseline",
        "activations",
        "5.24 GB",
        "peak op (plan)      _log_softmax_backward_data",
        "Answer  optimal",
        "+6.63 %",
        "no schedule within the budget is faster",
        "recomputed ops",
        "solve time",
    ):
        assert words in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert "\x1b" not in printed.out  # no terminal, no colour


@pytest.mark.slow
def test_every_file_is_written_and_named(tmp_path, capsys):
    names = ("schedule.json", "graph.json", "memory.png", "curve.svg")
    out_place = tmp_path / "out"
    out_place.mkdir()
    schedule, graph, memory, curve = (str(out_place / name) for name in names)
    given = residual(n_blocks=6)
    given.save(tmp_path / "given.json")
    budget_bytes = int(0.8 * baseline_peak_bytes(given))
    options = ["-o", schedule, "--graph-out", graph, "--plot", memory, "--pareto", curve]
    options += ["--budget", str(budget_bytes), "--method", "sqrt"]
    assert main([*options, str(tmp_path / "given.json")]) == 0
    out = capsys.readouterr().out.replace("\n", "").replace(" ", "")
    assert all(name in out for name in names)
    solution = Solution.load(schedule, graph=graph)
    assert solution.simulation.peak_bytes <= budget_bytes
    assert Graph.load(graph) == given
    assert Path(memory).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path(curve).read_text()
    assert sorted(os.listdir(out_place)) == sorted(names)  # no temporary files stay


def test_json_is_one_object_and_nothing_else(capsys):
    assert main(["--budget", "4GB", "--json", GPT2]) == 0
    printed = capsys.readouterr()
    assert without_progress(printed.err) == ""
    report = json.loads(printed.out)
    assert report["format"] == "report/1"
    assert report["status"] == "optimal"
    assert report["exit_code"] == 0
    assert report["budget_bytes"] == 4 * 10**9
    assert report["schedule"]["peak_bytes"] <= 4 * 10**9
    assert report["baseline"]["peak_bytes"] == 5_240_639_492
    assert report["baseline"]["peak_op"]["node"] == "_log_softmax_backward_data"
    for run in (report["baseline"], report["schedule"]):
        assert sum(run["memory_bytes"].values()) == run["peak_bytes"]


def test_quiet_says_nothing(tmp_path, capsys):
    assert main(["--budget", "4GB", "--quiet", "-o", str(tmp_path / "s.json"), GPT2]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "s.json").exists()


def test_a_comparison_has_a_row_for_each_method(capsys, monkeypatch):
    few = {name: METHODS[name] for name in ("auto", "none", "sqrt")}
    monkeypatch.setattr(checkpoint_solver.cli.arguments, "METHODS", few)
    assert main(["--budget", "4GB", "--compare", GPT2]) == 0
    out = capsys.readouterr().out
    table = out[out.index("Methods") : out.index("Answer")]
    assert [line.split()[0] for line in table.splitlines()[2:] if line.strip()] == list(few)
    assert max(map(len, out.splitlines())) <= 80
    assert "method              auto" in out  # the best of them is the answer


def test_a_method_that_refuses_the_graph_does_not_end_a_comparison(capsys, monkeypatch):
    def refuses(graph, **_options):
        raise TooLargeError("364 ops are too many, at most 10")

    monkeypatch.setitem(METHODS, "none", Method(refuses))
    monkeypatch.setattr(
        checkpoint_solver.cli.arguments,
        "METHODS",
        {name: METHODS[name] for name in ("none", "sqrt")},
    )
    assert main(["--budget", "4GB", "--compare", GPT2]) == 0
    assert "Refused by none: 364 ops are too many, at most 10" in capsys.readouterr().out
    line = failed(capsys, "--budget", "4GB", "--method", "none", GPT2, code=2)
    assert line == "solve: --method none: 364 ops are too many, at most 10"


def test_the_reserve_is_taken_off_and_echoed(capsys):
    assert main(["--budget", "4.5GB", "--reserve", "500MB", GPT2]) == 0
    out = capsys.readouterr().out
    assert "500.0 MB (476.84 MiB)" in out
    assert "available           4.00 GB" in out


def test_a_share_of_a_named_devices_memory(capsys):
    report = json_of(capsys, "--budget", "25%", "--device", "t4", GPT2)
    assert report["budget_bytes"] == 4 * 10**9
    assert report["reserve_bytes"] == 750 * 10**6  # a CUDA device keeps some for itself


# What cannot be done, and its exit code.


@pytest.mark.slow
def test_infeasible_names_the_least_budget_and_the_op(capsys):
    assert main(["--budget", "2GB", "--method", "sqrt", GPT2]) == 3
    printed = capsys.readouterr()
    assert "Answer  infeasible" in printed.out
    assert "minimum budget" in printed.out
    assert "no schedule fits below 2.80 GB" in printed.out
    assert "bottleneck op" in printed.out
    line = printed.err.splitlines()[-1]  # those before it say what takes long on a busy machine
    assert line.startswith("solve: infeasible: no schedule fits 2.00 GB (1.86 GiB); ")
    assert "_log_softmax_backward_data" in printed.err
    found = re.search(r"minimum budget found: (\d\.\d\d) GB", line)
    assert found is not None
    assert 2.8 <= float(found[1]) < 3.2


def test_infeasible_for_one_method_is_not_infeasible(capsys):
    line = failed(capsys, "--budget", "4GB", "--method", "none", "--quiet", GPT2, code=3)
    assert "method none finds no schedule that fits" in line
    assert "minimum budget found: 5.25 GB" in line


def test_infeasible_as_json(tmp_path, capsys):
    graph, path = residual(n_blocks=6), str(tmp_path / "g.json")
    graph.save(path)
    budget_bytes = graph.resident_bytes + 1
    report = json_of(capsys, "--budget", str(budget_bytes), "--method", "sqrt", path, code=3)
    assert report["status"] == "infeasible"
    assert report["exit_code"] == 3
    assert report["schedule"] is None
    why, least = report["infeasible"], StorageGraph.of(graph).least_bytes
    assert why["proven"] is True
    assert why["op"]["node"] == graph.nodes[int(least.argmax())].name
    assert least.max() <= why["proven_budget_bytes"] <= why["least_budget_bytes"]
    assert why["least_budget_bytes"] < baseline_peak_bytes(graph)


def test_a_plot_that_is_not_written_is_named(tmp_path, capsys):
    path = tmp_path / "m.png"
    assert main(["--budget", "2GB", "--plot", str(path), "--method", "none", GPT2]) == 3
    assert "m.pngisnotwritten:thereisnoplan" in "".join(capsys.readouterr().out.split())
    assert not path.exists()


def test_nothing_is_written_for_a_plan_that_is_not_there(tmp_path):
    options = ["-o", str(tmp_path / "s.json"), "--plot", str(tmp_path / "m.png"), "--quiet"]
    assert main(["--budget", "2GB", *options, "--method", "none", GPT2]) == 3
    assert not os.path.exists(tmp_path / "s.json")


def test_the_time_limit_has_its_own_exit_code(capsys, monkeypatch):
    def too_slow(graph, **_options):
        return Proposal(None, timed_out=True)

    monkeypatch.setitem(METHODS, "sqrt", Method(too_slow))
    line = failed(
        capsys,
        "--budget",
        "4GB",
        "--method",
        "sqrt",
        "--time-limit",
        "0.5",
        "--quiet",
        GPT2,
        code=6,
    )
    assert "within the time limit" in line


def pressed(graph, *, found, **_options):
    """A search during which Ctrl-C is pressed, and what it has found by then."""
    signal.raise_signal(signal.SIGINT)
    return Proposal(baseline(graph) if found else None, timed_out=True)


def test_ctrl_c_gives_the_best_so_far(capsys, monkeypatch):
    monkeypatch.setitem(METHODS, "sqrt", Method(functools.partial(pressed, found=True)))
    assert main(["--budget", "6GB", "--method", "sqrt", GPT2]) == 0
    assert "Note: Interrupted: the best plan found so far" in capsys.readouterr().out


def test_ctrl_c_in_a_comparison_keeps_what_is_there(capsys, monkeypatch):
    monkeypatch.setitem(METHODS, "sqrt", Method(functools.partial(pressed, found=False)))
    few = {name: METHODS[name] for name in ("auto", "sqrt", "none")}
    monkeypatch.setattr(checkpoint_solver.cli.arguments, "METHODS", few)
    assert main(["--budget", "4GB", "--compare", GPT2]) == 0
    assert "Interrupted" in capsys.readouterr().out


def test_ctrl_c_before_anything_is_found(capsys, monkeypatch):
    monkeypatch.setitem(METHODS, "sqrt", Method(functools.partial(pressed, found=False)))
    assert (
        failed(capsys, "--budget", "4GB", "--method", "sqrt", GPT2, code=130)
        == "solve: interrupted"
    )


def test_the_second_ctrl_c_ends_the_command(capsys, monkeypatch):
    def impatient(graph, **options):
        pressed(graph, found=True)
        return pressed(graph, found=True)

    monkeypatch.setitem(METHODS, "sqrt", Method(impatient))
    assert (
        failed(capsys, "--budget", "6GB", "--method", "sqrt", GPT2, code=130)
        == "solve: interrupted"
    )


def test_a_graph_file_of_the_plain_step_is_planned_without_rewrites(capsys):
    assert main(["--budget", "6GB", "--rewrites", "none", "--quiet", GPT2]) == 0
    assert without_progress(capsys.readouterr().err) == ""


def test_help_and_version(capsys):
    for option, words in (("--help", "exit codes:"), ("--version", "solve ")):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0
        assert words in capsys.readouterr().out


@pytest.mark.slow
def test_methods_side_by_side_share_the_best_bound(tmp_path, capsys):
    graph = residual(n_blocks=6)
    graph.save(tmp_path / "g.json")
    budget_bytes = int(0.8 * baseline_peak_bytes(graph))
    # less than a second, so that it ends the integer program: `tests/support/time_limits.py`
    options = ["--budget", str(budget_bytes), "--compare", "--json", "--time-limit", "0.9"]
    assert main([*options, str(tmp_path / "g.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    bounds = {answer["lower_bound_s"] for answer in report["methods"]}
    assert len(bounds) == 1
