"""Compare the model of PyTorch's caching allocator with PyTorch's own binary, without a GPU.

    pip download --no-deps torch==2.13.0          # the build with CUDA, from pypi.org
    python -m benchmarks.allocator --wheel torch-2.13.0-*.whl --record tests/data/allocator.json

The wheel's libc10_cuda.so runs on a fake CUDA runtime, which only hands out addresses and counts
bytes (`fake_cuda.cpp`). This needs g++ and the headers of CUDA 13 (`--cuda`), but neither a driver
nor a GPU. Random traces and traces of plans are played through both. After each allocation and free
they must agree on allocated bytes, reserved bytes, failures, and how often free memory was returned
to a full device. Plans whose budget is of reserved memory must run on a device of just that size.

CUDA chooses the addresses of segments; the model assumes that they ascend. If they descend, results
may differ on a full device with expandable segments, where the second range is then searched first.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.allocator.traces import (
    GPT2,
    Trace,
    outcomes,
    plan_traces,
    random_trace,
    steps_trace,
)
from graphs.graph import Graph
from solver import solve

SOURCES = Path(__file__).parent
SHAPES = ("mixed", "few")
N_STREAMS = (1, 3)
N_RANDOM = 40
"""Random traces of each `Kind`."""
N_OPS = 400
CAPACITY_BYTES = 700 * 2**20
BUDGETS, OF = (5_200_000_000, 4_000_000_000, 3_200_000_000), ("allocated", "reserved")
N_RECORDED, N_RECORDED_OPS = 1, 150
"""How many shorter traces of each `Kind` to record for the tests, and their length."""


@dataclass(frozen=True)
class Kind:
    """How traces are made and played.

    shape, n_streams: of the traces; see `random_trace`.
    expandable: whether the allocator uses expandable segments.
    capacity_bytes: memory of the device (None: unlimited).
    downwards: whether the fake CUDA runtime hands out descending addresses.
    """

    shape: str
    n_streams: int
    expandable: bool
    capacity_bytes: int | None
    downwards: bool

    def traces(self, n: int, n_ops: int) -> Iterator[Trace]:
        for seed in range(n):
            yield random_trace(random.Random(seed), n_ops, self.shape, self.n_streams)


def main() -> None:
    arguments = harness.parser("allocator", __doc__)
    arguments.add_argument("--wheel", type=Path, required=True, help="of torch with CUDA 13")
    arguments.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda"))
    arguments.add_argument("--record", type=Path, help="write traces and outcomes for the tests")
    options = arguments.parse_args()
    kinds = [
        Kind(*each)
        for each in itertools.product(
            SHAPES, N_STREAMS, (False, True), (None, CAPACITY_BYTES), (False, True)
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        player = Player(Path(folder), options.wheel, options.cuda)
        rows = [_compare_traces(kind, kind.traces(N_RANDOM, N_OPS), player) for kind in kinds]
        rows += [
            _compare_traces(
                Kind("plans", 1, expandable, None, downwards=False), plan_traces(), player
            )
            for expandable in (False, True)
        ]
        budget_rows = [
            _run_within_budget(*each, player)
            for each in itertools.product((False, True), BUDGETS, OF)
        ]
        report = {"circumstances": harness.circumstances(), "wheel": options.wheel.name}
        harness.write(options.out, report | {"kinds": rows, "fits": budget_rows})
        if options.record:
            recorded = [
                {**vars(kind), "trace": trace, "outcomes": player(trace, kind)}
                for kind in kinds
                if not kind.downwards
                for trace in kind.traces(N_RECORDED, N_RECORDED_OPS)
            ]
            options.record.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")
    different = any(row["n_different"] for row in rows if not row["downwards"])
    sys.exit(
        different or any(row["n_failed"] for row in budget_rows if row["budget_of"] == "reserved")
    )


def _compare_traces(kind: Kind, traces: Iterator[Trace], player: Player) -> harness.Row:
    """Play the traces through both allocators and count those that differ."""
    agreements = [
        player(trace, kind)
        == outcomes(trace, expandable=kind.expandable, capacity_bytes=kind.capacity_bytes)
        for trace in traces
    ]
    row = {**vars(kind), "n_traces": len(agreements), "n_different": agreements.count(False)}
    print(row, file=sys.stderr, flush=True)
    return row


def _run_within_budget(
    expandable: bool, budget_bytes: int, budget_of: str, player: Player
) -> harness.Row:
    """Play six steps of a plan for GPT-2 on a device that has just the bytes of the budget."""
    graph = Graph.load(GPT2)
    os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    solution = solve(graph, budget=budget_bytes, budget_of=budget_of)
    assert solution.schedule is not None
    trace = steps_trace(graph, solution.schedule, n_steps=6)
    kind = Kind("plan", 1, expandable, budget_bytes, downwards=False)
    results = player(trace, kind)
    row = {
        "expandable": expandable,
        "budget_bytes": budget_bytes,
        "budget_of": budget_of,
        "overhead": solution.overhead,
        "n_failed": sum(failed for *_, failed in results),
        "n_returns": results[-1][2],
        "reserved_bytes": max(each[1] for each in results),
    }
    print(row, file=sys.stderr, flush=True)
    return row


class Player:
    """PyTorch's own allocator as a program that plays traces; built when this is made."""

    def __init__(self, folder: Path, wheel: Path, cuda: Path) -> None:
        self.folder = folder
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                library = name in ("torch/lib/libc10.so", "torch/lib/libc10_cuda.so")
                if library or name.startswith(("torch/include/c10/", "torch/include/torch/header")):
                    archive.extract(name, folder)
        self.libraries = folder / "torch" / "lib"
        headers = [f"-I{cuda / 'include'}", f"-I{folder / 'torch' / 'include'}"]
        versions = folder / "versions"
        versions.write_text("libcudart.so.13 { global: *; };")
        fake = ["-shared", "-fPIC", "-include", "string", str(SOURCES / "fake_cuda.cpp")]
        runtime, nvml = "libcudart.so.13", "libnvidia-ml.so.1"
        self._build(runtime, *fake, *headers, f"-Wl,-soname,{runtime},--version-script={versions}")
        self._build(nvml, *fake, *headers, f"-Wl,-soname,{nvml}")
        libraries = [f"-L{self.libraries}", f"-L{folder}", "-lc10_cuda", "-lc10", f"-l:{runtime}"]
        self._build("play", str(SOURCES / "play.cpp"), *headers, *libraries)

    def _build(self, name: str, *words: str) -> None:
        command = ["g++", "-std=c++20", "-O1", "-w", "-o", str(self.folder / name), *words]
        subprocess.run(command, check=True)

    def __call__(self, trace: Trace, kind: Kind) -> list[list[int]]:
        """Play a trace; returns what `outcomes` returns for the model."""
        environment = dict(os.environ, LD_LIBRARY_PATH=f"{self.folder}:{self.libraries}")
        environment["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{kind.expandable}"
        if kind.capacity_bytes is not None:
            environment["FAKE_CAPACITY"] = str(kind.capacity_bytes)
        if kind.downwards:
            environment["FAKE_DOWNWARDS"] = "1"
        process = subprocess.run(
            [str(self.folder / "play")],
            input="\n".join(_request_line(op) for op in trace),
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        lines = [line.split() for line in process.stdout.splitlines()]
        return [[*map(int, line[:3]), int(len(line) > 3)] for line in lines]


def _request_line(op: Sequence[int]) -> str:
    return f"f {op[0]}" if len(op) == 1 else f"a {op[0]} {op[1]} {op[2]}"


if __name__ == "__main__":
    main()
