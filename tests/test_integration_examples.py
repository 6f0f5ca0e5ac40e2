"""The scripts of examples/integrations run and recompute within their budgets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = {"ddp": ["-m", "torch.distributed.run", "--nproc-per-node", "2"]}
OPTIONS = {"plain_loop": ["--fit"]}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "integrations").glob("*.py")), ids=lambda path: path.stem
)
def test_a_script_runs(path: Path) -> None:
    command = [sys.executable, *LAUNCH.get(path.stem, []), str(path), *OPTIONS.get(path.stem, [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again = re.findall(r"([0-9]+) ops run again", done.stdout)
    assert again
    assert all(int(n) > 0 for n in again)
