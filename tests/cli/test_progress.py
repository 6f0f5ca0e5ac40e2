"""Long work: what is said meanwhile on a terminal, and what Ctrl-C leaves, by real signals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

import checkpoint_solver.cli
import checkpoint_solver.cli.outputs
from checkpoint_solver.cli.command import main
from checkpoint_solver.cli.progress import Progress
from graphs.synthetic.nets import residual
from solver.plan_analysis.pareto import sweep
from tests.support.budgets import baseline_peak_bytes
from tests.support.command import write_model
from tests.support.paths import GPT2 as GPT2_PATH
from tests.support.paths import ROOT

GPT2 = str(GPT2_PATH)


def test_what_is_said_on_a_terminal():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    with Progress(quiet=False, console=console).showing("sweeping") as say:
        say("3 of 20 plans")
        until_s = time.monotonic() + 600  # drawn by a thread, some twelve times a second
        while "3 of 20" not in text.getvalue() and time.monotonic() < until_s:
            time.sleep(0.02)
    assert "sweeping: 3 of 20 plans" in text.getvalue()


class Written(io.StringIO):
    """came: a line of the thread that tells what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "3 of [20] plans (" in self.getvalue():
            self.came.set()
        return written


def test_what_takes_long_is_said_without_a_terminal(monkeypatch):
    monkeypatch.setattr("solver.sizes_deadlines_progress.progress_in_logs.FIRST_AFTER_S", 0.001)
    text = Written()
    console = Console(file=text, force_terminal=False, width=80)
    with Progress(quiet=False, console=console).showing("sweeping") as say:
        say("3 of [20] plans")
        assert text.came.wait(600)
    assert re.fullmatch(
        r"sweeping: 3 of \[20\] plans \(\d+ s\)\.\.\.", text.getvalue().split("\n")[-2]
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_said_when_quiet(terminal, monkeypatch):
    monkeypatch.setattr("checkpoint_solver.cli.progress.log_progress", None)  # not even begun
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=80)
    with Progress(quiet=True, console=console).showing("sweeping") as say:
        say("3 of 20 plans")
    assert text.getvalue() == ""


def test_the_command_says_on_stderr_what_takes_long(capsys, monkeypatch):
    """Also inside of one search, which tells nothing itself."""
    begun = []

    @contextlib.contextmanager
    def at_once(what, write):
        begun.append(what)
        write(f"{what} (2 s)...")
        yield write

    monkeypatch.setattr("checkpoint_solver.cli.progress.log_progress", at_once)
    assert main(["--budget", "4GB", "--method", "sqrt", "--json", GPT2]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "reading the graph (2 s)...",
        "searching with sqrt (364 ops) (2 s)...",
    ]
    assert json.loads(printed.out)["exit_code"] == 0
    begun.clear()
    assert main(["--budget", "4GB", "--method", "sqrt", "--quiet", GPT2]) == 0
    assert (begun, capsys.readouterr()) == ([], ("", ""))


@pytest.mark.parametrize("quiet", [False, True])
def test_what_takes_minutes_is_said_without_a_terminal(quiet):
    text = io.StringIO()
    console = Console(file=text, force_terminal=False, width=80)
    with Progress(quiet=quiet, console=console).showing("verifying", always=True) as say:
        say("results of the baseline")
    assert text.getvalue() == ("" if quiet else "verifying: results of the baseline\n")


def started(*argv: str, stderr: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "checkpoint_solver", *argv],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )


def read_terminal(master: int, *, until: bytes | None = None) -> bytes:
    """What is written to the other end, until it is closed or until this text."""
    said = b""
    while until is None or until not in said:
        try:
            part = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    return said


ON_TERMINALS = pytest.mark.skipif(
    not hasattr(os, "openpty"),
    reason="os.openpty is missing, as on Windows, and progress is drawn on terminals only",
)


@pytest.mark.slow
@ON_TERMINALS
def test_a_sweep_says_how_far_it_is(tmp_path):
    master, slave = os.openpty()
    curve = str(tmp_path / "c.svg")
    process = started("--budget", "4GB", "--method", "sqrt", "--pareto", curve, GPT2, stderr=slave)
    os.close(slave)
    said = read_terminal(master)
    os.close(master)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert b"searching with sqrt (364 ops)" in said
    assert b"sweeping budgets for the curve: " in said
    assert b"of 21 plans" in said  # twenty budgets and the one that was asked for
    assert "sweeping" not in out


@pytest.mark.slow
@ON_TERMINALS
def test_a_real_ctrl_c_in_the_sweep_keeps_the_plan(tmp_path):
    schedule, curve = tmp_path / "s.json", tmp_path / "c.svg"
    argv = ["--budget", "4GB", "--method", "dp", "-o", str(schedule), "--pareto", str(curve), GPT2]
    master, slave = os.openpty()
    process = started(*argv, stderr=slave)
    os.close(slave)
    read_terminal(master, until=b"of 21 plans")
    assert schedule.exists()
    process.send_signal(signal.SIGINT)
    said = read_terminal(master)
    os.close(master)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert b"Traceback" not in said
    assert "Interrupted while sweeping budgets" in out
    assert "Answer" in out


@pytest.mark.slow
def test_ctrl_c_in_the_sweep_draws_the_points_that_are_there(tmp_path, capsys, monkeypatch):
    graph = residual(n_blocks=5)
    graph.save(tmp_path / "g.json")
    peak_bytes = baseline_peak_bytes(graph)

    def interrupted(graph, **options):
        curve = sweep(graph, **{**options, "budgets": [peak_bytes]})
        signal.raise_signal(signal.SIGINT)
        return curve

    monkeypatch.setattr(checkpoint_solver.cli.outputs, "sweep", interrupted)
    curve, page = tmp_path / "c.svg", tmp_path / "p.html"
    argv = ["--budget", str(peak_bytes), "--method", "sqrt", str(tmp_path / "g.json")]
    assert main([*argv, "--pareto", str(curve), "--report", str(page)]) == 0
    assert "it has the points computed so far" in " ".join(capsys.readouterr().out.split())
    assert "<svg" in curve.read_text()
    assert "Overhead against budget" in page.read_text()


def test_ctrl_c_before_any_point_leaves_the_curve_out(tmp_path, capsys, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_solver.cli.outputs, "sweep", interrupted)
    curve = tmp_path / "c.svg"
    assert main(["--budget", "4GB", "--method", "sqrt", "--pareto", str(curve), GPT2]) == 0
    assert "it is not drawn" in " ".join(capsys.readouterr().out.split())
    assert not curve.exists()


def test_ctrl_c_while_the_least_budget_is_sought(capsys, monkeypatch):
    def interrupted(solution):
        signal.raise_signal(signal.SIGINT)
        return solution

    monkeypatch.setattr("checkpoint_solver.cli.command.with_obstacle", interrupted)
    assert main(["--budget", "4GB", "--method", "none", GPT2]) == 130
    printed = capsys.readouterr()
    assert "interrupted" in printed.err
    assert "Interrupted" in printed.out
    assert "Answer  infeasible" in printed.out


def test_ctrl_c_while_verifying_keeps_the_plan(tmp_path, capsys, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("scheduler_runtime.verifying.run_both_steps", interrupted)
    schedule = tmp_path / "s.json"
    argv = ["--budget", "1MB", "--verify", "-o", str(schedule), write_model(tmp_path)]
    assert main(argv) == 5
    printed = capsys.readouterr()
    assert "reason              interrupted" in printed.out
    assert "Answer  optimal" in printed.out
    assert schedule.exists()
