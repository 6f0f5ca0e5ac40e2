"""Programs of tests.support that start ranks of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.support.paths import ROOT


def ranks_of(program: str, *arguments: str) -> list[Any]:
    """What the ranks of a program in tests.support print in JSON, line by line."""
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
