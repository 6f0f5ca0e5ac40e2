"""Ctrl-C, by real signals, while C code holds the main thread that would run for minutes.

A guard ends a process that hangs; nothing is asserted of the clock. Without the signal each of
these processes would run far longer than the guard.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import pytest

from checkpoint_solver.cli.command import main
from solver.schedule.solution import Solution
from tests.support import synthetic_graphs
from tests.support.command import without_progress, write_model
from tests.support.paths import ROOT

GUARD_S = 300
INSIDE_S = 0.5
"""From the line before the call of C code until it is in there."""

HARD = """
    import sys

    import numpy as np
    import scipy.optimize
    from scipy.optimize import Bounds, LinearConstraint

    EASY = int(sys.argv.pop())  # linear programs that are solved before
    solved, n_calls = scipy.optimize.milp, 0

    def market_split():  # 40 items in two halves of equal value, for 6 values: hours of search
        values = np.random.default_rng(0).integers(0, 100, (6, 40))
        return values, values.sum(axis=1) // 2

    def milp(*args, **options):
        global n_calls
        n_calls += 1
        if n_calls <= EASY:
            return solved(*args, **options)
        values, halves = market_split()
        print("inside", file=sys.stderr, flush=True)
        return solved(
            c=np.zeros(40),
            integrality=np.ones(40),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(values, halves, halves),
        )

    scipy.optimize.milp = milp
"""
COMMAND = """
    from checkpoint_solver.cli import ctrl_c, process
    ctrl_c.GRACE_S = 600.0
    sys.exit(process())
"""
"""The main thread ends the search and writes what was found, however busy the machine is."""
RUN_IT = """
    from checkpoint_solver.cli import process
    sys.exit(process())
"""
IN_PYTHON = """
    import os
    from solver import solve
    try:
        solve(sys.argv[1], budget=1638404, time_limit_s=1e6)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
        os._exit(0)  # the program that nobody waits for is still searched
"""
INTEGER_PROGRAM = """
    import pulp

    hard = pulp.LpProblem()
    chosen = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(40)]
    for row, half in zip(*market_split()):
        hard += pulp.lpSum(int(n) * x for n, x in zip(row, chosen)) == int(half)
    solve_easy = pulp.LpProblem.solve

    def solve_hard(_problem, solver):
        print("inside", file=sys.stderr, flush=True)
        return solve_easy(hard, solver)

    pulp.LpProblem.solve = solve_hard
"""


def interrupted(
    program: str, *argv: str, path: Path | None = None, line: str = "inside"
) -> tuple[int, str, str]:
    """Start Python, press Ctrl-C while it is in C code: exit code, stdout and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT if path is None else path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        said = next((text for text in process.stderr if text == f"{line}\n"), None)
        assert said is not None, "it ended before"
        time.sleep(INSIDE_S)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
    return process.returncode, out, without_progress(err)


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    synthetic_graphs.recurrent(n_steps=3).save(path)
    return str(path)


BUDGET, NOTHING_YET, FOUND = "1638404", "5", "70"
"""Of that graph: within that budget 79 linear programs are solved, 61 of them before a plan."""
FOREVER = ("--budget", BUDGET, "--time-limit", "1e6")


@pytest.mark.slow
def test_python_raises_keyboard_interrupt(graph: str) -> None:
    code, out, _ = interrupted(HARD + IN_PYTHON, graph, FOUND)
    assert (code, out) == (0, "KeyboardInterrupt\n")


LEFT = """
    import sys
    import threading
    import time
    from solver.sizes_deadlines_progress import interruptible

    left = threading.Event()

    def call():
        print("inside", file=sys.stderr, flush=True)
        left.wait()
        time.sleep({seconds})
        print("ended", flush=True)

    try:
        interruptible(call)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
        left.set()
"""


@pytest.mark.parametrize(("seconds", "ended"), [(0.1, "ended\n"), (10 * GUARD_S, "")])
def test_a_call_that_ends_soon_ends_before_the_interpreter(seconds: float, ended: str) -> None:
    """C++ code that ends later aborts the process; what takes long is not waited for."""
    code, out, err = interrupted(LEFT.format(seconds=seconds))
    assert (code, out, err) == (0, f"KeyboardInterrupt\n{ended}", "")


@pytest.mark.slow
def test_a_search_that_has_found_nothing_ends(graph: str) -> None:
    code, out, err = interrupted(HARD + COMMAND, *FOREVER, "--json", graph, NOTHING_YET)
    assert (code, err) == (130, "solve: interrupted\n")
    assert json.loads(out) == {"status": "error", "error": "interrupted", "exit_code": 130}


@pytest.mark.slow
def test_the_best_plan_so_far_is_reported_and_written(graph: str, tmp_path: Path) -> None:
    path, page = tmp_path / "s.json", tmp_path / "page.html"
    argv = (*FOREVER, "-o", str(path), "--report", str(page), graph, FOUND)
    code, out, err = interrupted(HARD + COMMAND, *argv)
    assert (code, err) == (0, "")
    assert page.exists()
    assert "Interrupted: the curve of --report left out." in " ".join(out.split())
    assert "the search was interrupted" in out
    assert "Note: Interrupted: the best plan found so far." in out
    assert "time limit" not in out
    assert Solution.load(path, graph=graph).status == "feasible"


DRAWING = """
    import pathlib
    import time

    from checkpoint_solver.cli import ctrl_c, outputs

    def drawn(_report, path, **_options):
        time.sleep({seconds})
        pathlib.Path(path).touch()

    outputs.write_page = drawn
"""
LONGER_S = 8
"""Than a command runs on after Ctrl-C."""


@pytest.mark.slow
def test_what_takes_long_to_draw_is_left_out_after_the_signal(graph: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    argv = (*FOREVER, "--report", str(page), graph, FOUND)
    code, out, err = interrupted(HARD + DRAWING.format(seconds=LONGER_S) + RUN_IT, *argv)
    assert (code, err) == (0, "")
    assert not page.exists()
    assert out.count("Answer  feasible") == 1
    assert out.endswith("Note: Interrupted: --report left out.\n")


SLOWLY = """
    from checkpoint_solver.cli import ctrl_c
    from solver.reporting import terminal

    ctrl_c.GRACE_S, ctrl_c.PRINTING_S = 0.2, 600.0
    show = terminal.show

    def slowly(*args):
        time.sleep(2)
        show(*args)

    terminal.show = slowly
"""


@pytest.mark.slow
def test_what_is_being_printed_is_printed_whole_and_once(graph: str, tmp_path: Path) -> None:
    argv = (*FOREVER, "--report", str(tmp_path / "page.html"), graph, FOUND)
    code, out, err = interrupted(HARD + DRAWING.format(seconds=0) + SLOWLY + RUN_IT, *argv)
    assert (code, err) == (0, "")
    assert out.count("Answer  feasible") == 1
    assert "Note: Interrupted: the best plan found so far." in out


@pytest.mark.slow
def test_json_says_what_ended_the_search(graph: str) -> None:
    code, out, _ = interrupted(HARD + COMMAND, *FOREVER, "--json", graph, FOUND)
    answer = json.loads(out)
    assert (code, answer["interrupted"], answer["timed_out"]) == (0, True, False)


@pytest.mark.slow
def test_the_integer_program_ends(graph: str) -> None:
    argv = (*FOREVER, "--method", "ilp", graph, "1000")
    code, _, err = interrupted(HARD + INTEGER_PROGRAM + COMMAND, *argv)
    assert (code, err) == (130, "solve: interrupted\n")


STUCK = """
    import hashlib
    import sys
    import time

    def stuck():
        print("inside", file=sys.stderr, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # in C, without the interpreter's lock

    def stubborn():
        print("inside", file=sys.stderr, flush=True)
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass
"""
RUN = "import sys; from checkpoint_solver.cli import process; sys.exit(process())"


IMPORTING = """
    import sys
    import time

    print("inside", file=sys.stderr, flush=True)
    while True:
        {waits}
"""
WAITS = "time.sleep(600)"
SWALLOWS = """
        try:
            time.sleep(600)
        except BaseException:
            pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", [WAITS, SWALLOWS], ids=["waits", "swallows"])
def test_the_command_ends_while_it_is_loaded(tmp_path: Path, waits: str) -> None:
    """A library that it imports takes long."""
    (tmp_path / "rich.py").write_text(textwrap.dedent(IMPORTING.format(waits=waits)))
    program = "import runpy; runpy.run_module('checkpoint_solver', run_name='__main__')"
    code, out, err = interrupted(program, "--json", "--budget", "1MB", "model.py", path=tmp_path)
    assert (code, err) == (130, "solve: interrupted\n")
    assert json.loads(out) == {"status": "error", "error": "interrupted", "exit_code": 130}


def test_the_installed_command_starts_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"solve": "checkpoint_solver.cli:process"}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stuck", "stubborn"])
def test_the_command_ends_while_a_model_is_built(tmp_path: Path, what: str) -> None:
    path = write_model(tmp_path, ("    return Net()", f"    {what}()\n    return Net()"), add=STUCK)
    code, out, err = interrupted(RUN, "--budget", "1MB", path)
    assert (code, out, err) == (130, "", "solve: interrupted\n")


@pytest.mark.slow
def test_the_plan_is_there_where_the_verification_is_stuck(tmp_path: Path) -> None:
    head = "    def forward(self, x):\n"
    really = "        if type(x) is torch.Tensor and x.device.type == 'cpu':\n            stuck()\n"
    path = write_model(tmp_path, (head, head + really), add=STUCK)
    schedule = tmp_path / "s.json"
    argv = ("--budget", "1MB", "--device", "cpu", "--verify", "-o", str(schedule), path)
    code, out, err = interrupted(RUN, *argv)
    assert (code, err) == (5, "solve: --verify: interrupted\n")
    assert "Answer  optimal" in out
    assert "Interrupted: --verify left out" in out
    assert schedule.exists()


@pytest.mark.slow
def test_while_another_size_is_traced_the_largest_so_far_is_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tracing asks no deadline."""
    path = write_model(
        tmp_path,
        ("    return torch.randn", "    press_at_the_fifth()\n    return torch.randn"),
        add="""
            import pathlib
            import signal

            calls = []

            def press_at_the_fifth():
                calls.append(True)
                if len(calls) == 5:
                    signal.raise_signal(signal.SIGINT)
                    pathlib.Path(__file__).with_name("traced on").touch()
        """,
    )
    assert main(["--budget", "100MB", "--device", "cpu", "--max-batch", path]) == 0
    assert not (tmp_path / "traced on").exists()
    out = " ".join(capsys.readouterr().out.split())
    assert "Interrupted: the largest size found to fit so far." in out
    assert "Answer optimal" in out
