"""The scripts of examples/integrations that use `fit` or `apply` run, and recompute as planned.

Those of the export are in test_export_integrations.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.paths import ROOT

SCRIPTS = (
    "accelerate_lora",
    "adapting_plans",
    "ddp",
    pytest.param("grid", marks=pytest.mark.distributed),
    "hugging_face_trainer",
    "lightning_module",
    "pipeline",
    "plain_loop",
    pytest.param("sharded_pipeline", marks=pytest.mark.distributed),
    "tensor_parallel",
    pytest.param(
        "zero",
        # optional: it compiles a C++ extension at its first start, and few plan for its engine
        marks=pytest.mark.skipif(
            find_spec("deepspeed") is None,
            reason="deepspeed is not installed; `pip install deepspeed` runs this example",
        ),
    ),
)
TWO_PROCESSES = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
LAUNCH = {
    "ddp": TWO_PROCESSES,
    "grid": [*TWO_PROCESSES[:-1], "4"],
    "pipeline": TWO_PROCESSES,
    "sharded_pipeline": [*TWO_PROCESSES[:-1], "4"],
    "tensor_parallel": TWO_PROCESSES,
    "zero": TWO_PROCESSES,
}
OPTIONS = {"plain_loop": ["--fit"], "zero": ["2"]}


@pytest.mark.slow(keep=len(SCRIPTS))
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs(script: str) -> None:
    path = ROOT / "examples" / "integrations" / f"{script}.py"
    command = [sys.executable, *LAUNCH.get(script, []), str(path), *OPTIONS.get(script, [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"([0-9]+) ops? recomputed", done.stdout)
    assert counts
    assert all(int(n) > 0 for n in counts)
