"""Check and measure on a GPU all that a CPU cannot show, in one command.

    python -m benchmarks.gpu --out DIR                  # the quick set on the first CUDA device
    python -m benchmarks.gpu --out DIR --full           # every model, share and card size
    python -m benchmarks.gpu --out DIR --parts ways     # one part
    python -m benchmarks.gpu --out DIR --device cpu     # the same code at small size

DIR/gpu.json holds the machine, versions, commands and figures; a case that is in it is not run
again, so a run that was cut off goes on where it was. Each part stops after `--minutes`. Each case
runs in a process of its own, so that one does not leave memory or settings to the next.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import PARTS, QUICK_PARTS, Part, Settings
from benchmarks.gpu.picture import draw
from graphs.files import write_json

MARK = "figures: "


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    device = torch.device(arguments.device)
    if device.type not in ("cuda", "cpu"):
        print(f"device is {device}; what is measured here needs cuda (or cpu, for a try)")
        return 2
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu runs the same code at small size")
        return 2
    settings = Settings(device, full=arguments.full, backend=arguments.backend)
    if arguments.case:
        part, case = arguments.case.split(":", 1)
        earlier = json.loads(sys.stdin.read() or "{}")
        print(MARK + json.dumps(_row(PARTS[part], case, settings, earlier)))
        return 0
    names = arguments.parts or (list(PARTS) if arguments.full else list(QUICK_PARTS))
    results = Results(arguments.out, device)
    for name in names:
        _run_part(name, settings, results, arguments)
    results.data["parts"] = {
        n: results.data["parts"][n] for n in PARTS if n in results.data["parts"]
    }
    results.save()
    draw(results.data["parts"].get("ways", {}).get("cases", {}), arguments.out)
    for name in names:
        print(table(name, results.data["parts"][name]["cases"]))
    return 0


class Results:
    """DIR/gpu.json, written after every case."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu.json"
        machine = machine_of(device)
        self.data: dict[str, Any] = {"format": "gpu-benchmark/1", "machine": machine, "parts": {}}
        if self.path.exists():
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found.get("machine") != machine:
                raise SystemExit(
                    f"{self.path} holds figures of another machine or versions; give another --out"
                )
            self.data = found

    def cases(self, part: str) -> dict[str, Any]:
        entry = self.data["parts"].setdefault(
            part, {"title": PARTS[part].title, "commands": [], "seconds": 0.0, "cases": {}}
        )
        command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:])
        if command not in entry["commands"]:
            entry["commands"].append(command)
        return entry["cases"]

    def save(self) -> None:
        write_json(self.path, self.data)


def _run_part(
    name: str, settings: Settings, results: Results, arguments: argparse.Namespace
) -> None:
    done = results.cases(name)
    begun_s = time.monotonic()
    deadline_s = begun_s + 60 * arguments.minutes
    cases = PARTS[name].cases(settings)
    for number, case in enumerate(cases):
        left_s = deadline_s - time.monotonic()
        if case in done:
            continue
        if left_s <= 0:
            print(f"{name}: {len(cases) - number} cases are left; run the command again")
            break
        print(f"{name}: {case}", flush=True)
        done[case] = (
            _row(PARTS[name], case, settings, done)
            if arguments.in_process
            else _in_own_process(name, case, done, arguments, left_s)
        )
        results.data["parts"][name]["seconds"] += time.monotonic() - begun_s
        begun_s = time.monotonic()
        results.save()


def _row(part: Part, case: str, settings: Settings, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """A case's figures; what goes wrong is a row too, so that the others still run."""
    try:
        return part.run(case, settings, earlier)
    except Exception as error:  # noqa: BLE001 - a benchmark tells of every failure and goes on
        return {
            "status": "failed",
            "reason": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc().splitlines()[-6:],
        }


def _in_own_process(
    part: str,
    case: str,
    earlier: Mapping[str, Any],
    arguments: argparse.Namespace,
    left_s: float,
) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--out", str(arguments.out)),
        *("--device", arguments.device, "--backend", arguments.backend),
        *("--case", f"{part}:{case}"),
        *(["--full"] if arguments.full else []),
    ]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(earlier),
            capture_output=True,
            text=True,
            timeout=left_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done within {left_s:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return dict(json.loads(line.removeprefix(MARK)))
    return {"status": "failed", "reason": done.stderr[-600:]}


def machine_of(device: torch.device) -> dict[str, Any]:
    import numpy
    import scipy

    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "device": "cpu",
        "cpu": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        machine |= {
            "device": card.name,
            "memory_bytes": card.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return machine


def table(part: str, cases: Mapping[str, Any]) -> str:
    """The part's figures, a case a line; plain text, so that nothing need be installed."""
    columns = PARTS[part].columns
    rows = [["case", *columns]]
    for case, row in cases.items():
        rows.append([case, *(_shown(column, row.get(column)) for column in columns)])
        if row.get("status") in ("failed", "refused"):
            rows[-1][-1] = f"{row['status']}: {row.get('reason', '')[:60]}"
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    lines = ["", PARTS[part].title]
    lines += [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _shown(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes"):
        return f"{value / 1e6:.1f} MB"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (default: cuda)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), metavar="PART")
    parser.add_argument("--full", action="store_true", help="all models, shares and card sizes")
    parser.add_argument("--minutes", type=float, default=9.0, help="of each part (default: 9)")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--in-process", action="store_true", help="no process for each case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
