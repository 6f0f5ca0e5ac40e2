"""Run the programs of tests.support that start several ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.paths import ROOT


def ranks_of(program: str, *arguments: str) -> list[Any]:
    """Run a program of tests.support and return the values that its ranks print as JSON lines."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.support.{program}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in ("{", "[")]
