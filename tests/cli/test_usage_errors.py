"""What the command refuses before it searches: options, files and graphs, each with its reason."""

from __future__ import annotations

import json

import pytest

import checkpoint_solver.cli
import checkpoint_solver.cli.arguments
from checkpoint_solver.cli.command import main
from tests.support.command import failed
from tests.support.paths import GPT2 as GPT2_PATH
from tests.support.paths import ROOT

GPT2 = str(GPT2_PATH)


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (["absent.py"], 4, "absent.py: no such file"),
        (["hf:absent.json"], 4, "hf:absent.json: no such file; give a local config.json"),
        (["--device", "h1000", GPT2], 2, "device is 'h1000'; one of cpu, t4"),
        (["--device", "mps", GPT2], 2, "device 'mps' is not supported"),
    ],
)
def test_what_does_not_exist_is_told_before_pytorch_is_loaded(
    argv, code, reason, capsys, monkeypatch
):
    def loaded(*_arguments, **_options):
        raise AssertionError

    monkeypatch.setattr("checkpoint_solver.cli.problem.find_target", loaded)
    assert reason in failed(capsys, "--budget", "4GB", *argv, code=code)


def test_an_option_that_does_not_exist_is_told_its_nearest(capsys):
    for option in ("--budgte", "--budgte=4GB"):
        line = failed(capsys, option, "4GB", GPT2, code=2)
        assert "no option --budgte; did you mean --budget?" in line


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([GPT2], "--budget"),
        (["--budget", "4GB"], "problem"),
        (["--budget", "lots", GPT2], "invalid budget 'lots': write 16GB"),
        (["--budget", "0", GPT2], "must be above zero"),
        (["--budget", "-4GB", GPT2], "'-4GB': negative"),
        (["--budget=-4GB", GPT2], "'-4GB': negative"),
        (["--budget", "60%", GPT2], "is unknown"),
        (["--budget", "101%", "--device", "t4", GPT2], "more than the device has"),
        (["--budget", "60%", "--device", "cpu", GPT2], "is unknown"),
        (["--budget", "4GB", "--reserve", "-1", GPT2], "invalid reserve '-1': negative"),
        (["--budget", "4GB", "--reserve", "x", GPT2], "invalid reserve 'x'"),
        (["--budget", "4GB", "--reserve", "4GB", GPT2], "leaves nothing of the budget"),
        (
            ["--budget", "4GB", "--reserve", "4GB", GPT2],
            "smaller reserve: --reserve 0 leaves all of it to the step",
        ),
        (["--budget", "500MB", "--device", "h100", GPT2], "reserve of 750.0 MB"),
        (["--budget", "4GB", "--device", "z80", GPT2], "'z80'; one of cpu, t4"),
        (["--budget", "4GB", "--method", "magic", GPT2], "invalid choice: 'magic'"),
        (["--budget", "4GB", "--method", "auto", "--compare", GPT2], "not allowed with"),
        (
            ["--budget", "4GB", "--time-limit", "0", GPT2],
            "seconds '0': must be above zero",
        ),
        (["--budget", "4GB", "--time-limit", "nan", GPT2], "invalid number of seconds 'nan'"),
        (["--budget", "4GB", "--time-limit", "soon", GPT2], "invalid number of seconds 'soon'"),
        (["--budget", "4GB", "--seed", "-1", GPT2], "'-1': at least 0 expected"),
        (["--budget", "4GB", "--seed", "x", GPT2], "invalid value 'x'"),
        (
            ["--budget", "4GB", "--batch-size", "0", "m.py"],
            "'0': at least 1 expected",
        ),
        (["--budget", "4GB", "--autocast", "int8", "m.py"], "invalid choice: 'int8'"),
        (["--budget", "4GB", "--frobnicate", GPT2], "--frobnicate"),
        (["--budget", "4GB", GPT2, "extra"], "extra"),
        (
            ["--budget", "4GB", "--batch-size", "4", GPT2],
            "--batch-size: not possible",
        ),
        (["--budget", "4GB", "--verify", GPT2], "--verify: not possible"),
        (["--budget", "4GB", "--zero", "2", "--ranks", "8", GPT2], "--zero, --ranks: not possible"),
        (["--explain", "s.json", GPT2], "write solve explain schedule.json graph.json"),
        (
            ["--budget", "4GB", "--costs", "measured", GPT2],
            "--costs: not possible",
        ),
        (
            ["--budget", "4GB", "--rewrites", "allclose", GPT2],
            "--rewrites allclose: not possible with a graph file",
        ),
        (["--budget", "4GB", "--plot", "m.jpg", GPT2], "must end in .png or .svg"),
        (["--budget", "4GB", "--pareto", "m", GPT2], "must end in .png or .svg"),
        (["--budget", "4GB", "--report", "m.txt", GPT2], "must end in .html or .htm"),
        (
            ["--budget", "4GB", "-o", "/no/such/place/s.json", GPT2],
            "directory: /no/such/place",
        ),
        (["--budget", "4GB", "-o", "/tmp", GPT2], "is a directory"),
        (["--budget", "4GB", "-o", "/proc/s.json", GPT2], "/proc/s.json: cannot be written"),
        (["--budget", "4GB", "-o", "/tmp/" + "x" * 300, GPT2], "cannot be written"),
        (["--budget", "4GB", "-o", "a.json", "--graph-out", "./a.json", GPT2], "the same file"),
    ],
)
def test_wrong_usage(argv, reason, capsys):
    assert reason in failed(capsys, *argv, code=2)


def test_an_output_that_cannot_be_written_is_found_before_the_search(tmp_path, monkeypatch):
    def searched(*_arguments, **_options):
        raise AssertionError("searched")

    monkeypatch.setattr(checkpoint_solver.cli.command, "attempt", searched)
    assert main(["--budget", "4GB", "-o", str(tmp_path / "no" / "s.json"), GPT2]) == 2


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("absent.json", "No such file"),
        ("absent.py", "no such file"),
        ("model.txt", "a model file ends in .py"),
        ("", "expected model.py"),
        ("package.module", "no module 'package'"),
        ("no.such.module:get_model", "no module 'no'"),
        (str(ROOT), "expected model.py"),
    ],
)
def test_what_is_no_problem(problem, reason, capsys):
    assert reason in failed(capsys, "--budget", "4GB", problem, code=4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ('{"format": "schedule/1"}', "this is a schedule file; a graph file is expected"),
        ('{"format": "graph/1", "outputs": [], "tensors": 5}', "'tensors' is 5"),
        ("[" * 100_000, "graph.json"),
    ],
)
def test_a_hostile_graph_file(content, reason, tmp_path, capsys):
    path = tmp_path / "graph.json"
    path.write_text(content)
    line = failed(capsys, "--budget", "4GB", str(path), code=4)
    assert reason in line
    assert str(path) in line


def test_an_error_is_an_object_with_json(capsys):
    assert main(["--budget", "4GB", "--json", "absent.json"]) == 4
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "status": "error",
        "error": "absent.json: No such file or directory; a graph file is expected",
        "exit_code": 4,
    }
