"""Time the command `solve` on tiny problems, where it spends nearly all of its time in imports.

    python -m benchmarks.start_up --out benchmarks/results/start_up.json

Each run is a separate process. Reported are the median processor seconds of several runs, which
take turns, and their ratio to those of `import torch`. The aims are a ratio of 1.5 for the model
file and 0.5 s for the graph file. Run this once before, so that Python's bytecode is cached.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Row

N_RUNS = 5
MODEL = """
import torch
from torch import nn

def get_model():
    hidden = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), *hidden, nn.Linear(256, 1))

def get_batch():
    return torch.randn(4096, 64)

def get_loss(output, batch):
    return output.mean()
"""
SOLVE = ("-m", "checkpoint_solver", "--budget")
SHARE = 0.8
"""The budget, as a share of the peak without a plan. If the step fits without recomputation, the
command imports less."""


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """Name of a run -> arguments for Python. Writes the files that they read into the folder."""
    model, graph = str(folder / "model.py"), str(folder / "graph.json")
    Path(model).write_text(MODEL)
    on_cpu = ("--device", "cpu", model)
    done = subprocess.run(
        [sys.executable, *SOLVE, "1GB", "--json", "--graph-out", graph, *on_cpu],
        check=True,
        capture_output=True,
    )
    budget = f"{int(SHARE * json.loads(done.stdout)['baseline']['peak_bytes'])}B"
    return {
        "import torch": ("-c", "import torch"),
        "model file that fits": (*SOLVE, "1GB", *on_cpu),
        "graph file that fits": (*SOLVE, "1GB", graph),
        "model file": (*SOLVE, budget, *on_cpu),
        "graph file": (*SOLVE, budget, graph),
        "--help": ("-m", "checkpoint_solver", "--help"),
    }


def processor_s(arguments: tuple[str, ...]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    options = harness.parser("start_up", __doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = commands(Path(folder))
        times_s: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(N_RUNS):
            for name, arguments in runs.items():
                times_s[name].append(processor_s(arguments))
    torch_s = statistics.median(times_s["import torch"])
    rows: dict[str, Row] = {}
    for name, each in times_s.items():
        seconds = statistics.median(each)
        rows[name] = {"processor_s": seconds, "of_import_torch": seconds / torch_s}
        print(f"{name}: {seconds:.2f} s, {seconds / torch_s:.2f} of `import torch`")
    if options.out is not None:
        report = {"circumstances": harness.circumstances(), "runs": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
