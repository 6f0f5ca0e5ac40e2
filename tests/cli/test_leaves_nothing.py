"""`main()` called by another program leaves that program as it was."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from solver.schedule.solution import Solution
from tests.support import synthetic_graphs
from tests.support.command import write_model
from tests.support.paths import ROOT

STATE = """
    import atexit, gc, json, os, signal, sys, threading, warnings

    OPEN = "/proc/self/fd"

    def is_open(number):
        return os.path.lexists(f"{OPEN}/{number}")  # not that of the list of them

    def state():
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        open_files = sorted(os.listdir(OPEN)) if os.path.exists(OPEN) else []
        return {
            "handlers": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
            "wakeup": wakeup,
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "files": [(n, os.readlink(f"{OPEN}/{n}")) for n in open_files if is_open(n)],
            "gc": [gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()],
            "streams": [id(sys.stdin), id(sys.stdout), id(sys.stderr)],
            "path": list(sys.path),
            "directory": os.getcwd(),
            "environment": dict(os.environ),
            "excepthook": str(sys.excepthook),
            "recursion": sys.getrecursionlimit(),
        }

    def changed(before, after):
        return {k: [before[k], after[k]] for k in before if before[k] != after[k]}
"""
CALL = """
    from checkpoint_solver.cli import main
    before = state()
    codes = [main(), main(sys.argv[1:])]
    print(json.dumps({"codes": codes, "changed": changed(before, state())}), file=sys.stderr)
"""


def called(program: str, *argv: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STATE) + textwrap.dedent(program), *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return dict(json.loads(done.stderr.strip().splitlines()[-1]))


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    synthetic_graphs.recurrent(n_steps=3).save(path)
    return str(path)


@pytest.mark.slow
def test_a_plan_of_a_graph(graph: str, tmp_path: Path) -> None:
    written = str(tmp_path / "s.json")
    found = called(CALL, "--budget", "1638404", "-o", written, graph)
    assert found == {"codes": [0, 0], "changed": {}}


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize(
    ("argv", "code"),
    [(("--version",), 0), (("--budget", "1"), 2), (("--budget", "1B", "missing.json"), 4)],
    ids=["version", "usage", "missing"],
)
def test_what_ends_early(argv: tuple[str, ...], code: int) -> None:
    assert called(CALL, *argv) == {"codes": [code, code], "changed": {}}


@pytest.mark.slow
def test_a_plan_of_a_model(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    warm = (
        "from checkpoint_solver.cli import main\nmain()\n"  # PyTorch's own first use sets variables
    )
    found = called(warm + textwrap.dedent(CALL), "--budget", "100MB", "--verify", path)
    assert found == {"codes": [0, 0], "changed": {}}


@pytest.mark.slow
def test_a_closed_pipe_stays_the_callers(graph: str) -> None:
    program = """
        reading, writing = os.pipe()
        os.close(reading)
        sys.stdout = os.fdopen(writing, "w", buffering=1)
        from checkpoint_solver.cli import main
        before = state()
        codes = [main()]
        sys.stdout, found = sys.__stdout__, {"codes": codes, "changed": changed(before, state())}
        print(json.dumps(found), file=sys.stderr, flush=True)
        os._exit(0)
    """
    assert called(program, "--budget", "1638404", graph) == {"codes": [0], "changed": {}}


PRESSED = """
    import scipy.optimize
    from checkpoint_solver.cli import main

    n_before, solved, calls = int(sys.argv.pop()), scipy.optimize.milp, []

    def milp(*args, **options):
        calls.append(1)
        if len(calls) == n_before + 1:
            signal.raise_signal(signal.SIGINT)
        return solved(*args, **options)

    scipy.optimize.milp = milp
    before = state()
    print(json.dumps({"codes": [main()], "changed": changed(before, state())}), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("n_before", "code"), [(0, 130), (5, 130), (70, 0)])
def test_ctrl_c_gives_the_best_plan_so_far_or_130(
    graph: str, tmp_path: Path, n_before: int, code: int
) -> None:
    """No part of a file is left, and the next call of the program is as the first."""
    written = tmp_path / "s.json"
    options = ("--budget", "1638404", "--time-limit", "1e6", "-o", str(written))
    assert called(PRESSED, *options, graph, str(n_before)) == {"codes": [code], "changed": {}}
    assert written.exists() == (code == 0)
    if code == 0:
        assert Solution.load(written, graph=graph).schedule is not None
    assert {path.name for path in tmp_path.iterdir()} <= {"graph.json", "s.json"}
