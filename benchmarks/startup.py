"""CPU seconds of the command on a tiny problem, which are those of its imports, beside torch's own.

    python -m benchmarks.startup [--rounds N]

The processes run in turns, so that a busy machine slows all of them alike; the least of each one's
user and system seconds counts. What imports have compiled is kept, as it is after an installation.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import table

MODEL = """
import torch
def get_model():
    first, last = torch.nn.Linear(64, 256), torch.nn.Linear(64, 1)
    middle = torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.ReLU()
    return torch.nn.Sequential(first, *middle, last)
def get_batch(batch_size=512):
    return torch.randn(batch_size, 64)
def get_loss(output, batch):
    return output.mean()
"""
BUDGET = "2.2MB"
"""Less than the step takes without a plan (2.3 MB), so there is something to search."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    n_rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        model, graph = Path(folder, "model.py"), Path(folder, "graph.json")
        model.write_text(MODEL)
        command = ("-m", "solver", "--budget", BUDGET)
        programs = {
            "`import torch`": ("-c", "import torch"),
            "model file": (*command, str(model), "--graph-out", str(graph)),
            "graph file": (*command, str(graph)),
            "--help": ("-m", "solver", "--help"),
        }
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        used_s: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(1 + n_rounds):
            for name, arguments in programs.items():
                used_s[name].append(cpu_s(arguments, environment))
    torch_s = min(used_s["`import torch`"][1:])  # without the round that compiles
    rows = ((name, min(s[1:]), min(s[1:]) / torch_s) for name, s in used_s.items())
    cells = ([name, f"{s:.2f} s", f"{ratio:.2f}"] for name, s, ratio in rows)
    print(table(["", "CPU time", "of `import torch`"], cells))


def cpu_s(arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """User and system seconds of Python with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
