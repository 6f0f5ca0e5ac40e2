"""A separate process that runs the command `solve` again and again.

    python -m tests.support.planner_process

Reads the arguments of each run from a line of JSON and answers with its exit code and output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from typing import Any

from checkpoint_solver.cli.command import main
from tests.support.paths import ROOT


class PlannerProcess:
    """Runs `solve` in another process, which is kept: starting one for each plan would take most of
    the time."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.planner_process"]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def solve(self, *arguments: str) -> dict[str, Any]:
        """The object that `solve --json` prints, with `exit_code`."""
        assert self._process.stdin is not None
        print(json.dumps(["--json", *arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


def _serve() -> None:
    # HiGHS sometimes prints a line to stdout, even if told not to. So file descriptor 1 becomes
    # stderr, and answers go to a copy of the old one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            main(json.loads(line))
        print(json.dumps(json.loads(out.getvalue())), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
