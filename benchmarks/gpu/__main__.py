"""Check and measure on a GPU everything that a CPU cannot show, in one command.

    python -m benchmarks.gpu --out DIR --parts smoke    # first: every path once, under 3 minutes
    python -m benchmarks.gpu --out DIR                  # the quick set on the first CUDA device
    python -m benchmarks.gpu --out DIR --full           # every model, share and card size
    python -m benchmarks.gpu --out DIR --parts ways     # one part
    python -m benchmarks.gpu --out DIR --device cpu     # the same code at small size

DIR/gpu.json holds the machine, versions, commands and figures. Cases that are in it are skipped, so
repeat the command to continue a run that was stopped. The command stops after `--minutes`, each
case after `--case-minutes`. Each case runs in a separate process, so that it leaves no memory or
settings to the next. Names of cases are words with slashes between them ("gpt2/ours/0.5").
`--only gpt2 unet --only ours` runs those that have one of the words of each `--only`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu import targets, turns
from benchmarks.gpu.bench import OUT_OF_MEMORY
from benchmarks.gpu.parts import EXPANDABLE, PARTS, QUICK_PARTS, Part, Settings
from graphs.costs import circumstances
from graphs.files import write_json

MARK = "figures: "
SAVE_LOCK = threading.Lock()
BITS_CASES = frozenset(PARTS["bits"].cases(Settings(torch.device("cpu")))) | {
    *("plans", "compile", "recorded", "copies")
}
"""Cases that compare bits: cuBLAS must add in a fixed order (CUBLAS_WORKSPACE_CONFIG)."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    device = torch.device(arguments.device)
    if device.type not in ("cuda", "cpu"):
        print(f"device is {device}; this benchmark needs cuda (or cpu, to try it at small size)")
        return 2
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device found; --device cpu runs the same code at small size")
        return 2
    if device.type == "cuda" and device.index is None:  # some functions need the index
        device = torch.device("cuda", 0)
    settings = Settings(device, full=arguments.full, backend=arguments.backend)
    if arguments.case:
        part, case = arguments.case.split(":", 1)
        earlier = json.loads(sys.stdin.read() or "{}")
        print(MARK + json.dumps(_run_case(PARTS[part], case, settings, earlier)))
        return 0
    if arguments.machine:
        print(MARK + json.dumps(machine_of(device)))
        return 0
    names = arguments.parts or (list(PARTS) if arguments.full else list(QUICK_PARTS))
    results = Results(arguments.out, _query_machine(device, arguments))
    deadline_s = time.monotonic() + 60 * arguments.minutes
    for name in names:
        _run_part(name, settings, results, arguments, deadline_s)
    parts = {name: results.data["parts"][name] for name in PARTS if name in results.data["parts"]}
    target_results = targets.check_targets({name: part["cases"] for name, part in parts.items()})
    results.data |= {"parts": parts, "targets": target_results}
    results.save()
    try:
        from benchmarks.gpu.picture import draw
    except ImportError as error:
        print(f"no plot is drawn: {error}")
    else:
        draw(parts.get("ways", {}).get("cases", {}), arguments.out)
    for name in names:
        print(table(name, parts[name]["cases"]))
    print(*targets.target_lines(target_results), sep="\n")
    return 0


class Results:
    """The contents of DIR/gpu.json, which is written after every case."""

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu.json"
        self.data: dict[str, Any] = {"format": "gpu-benchmark/1", "machine": machine, "parts": {}}
        if self.path.exists():
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if saved.get("machine") != machine:
                raise SystemExit(
                    f"{self.path} has figures of another machine or versions; choose another --out"
                )
            self.data = saved

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
    name: str,
    settings: Settings,
    results: Results,
    arguments: argparse.Namespace,
    deadline_s: float,
) -> None:
    """Run the cases of a part that are chosen and not done yet, `--jobs` at a time."""
    rows = results.cases(name)
    started_s = time.monotonic()
    n_jobs = 1 if PARTS[name].is_alone else arguments.jobs
    chosen = [case for case in PARTS[name].cases(settings) if _is_chosen(case, arguments.only)]

    def run(case: str) -> None:
        eager_case = f"{case.split('/')[0]}/eager"  # budgets are shares of its peak, so wait for it
        must_wait = len(case.split("/")) > 2 and eager_case in chosen
        while must_wait and eager_case not in rows and time.monotonic() < deadline_s:
            time.sleep(0.1)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        print(f"{name}: {case}", flush=True)
        earlier = dict(rows)
        row = (
            _run_case(PARTS[name], case, settings, earlier)
            if arguments.in_process
            else _run_case_in_process(name, case, earlier, arguments, left_s, n_jobs=n_jobs)
        )
        with SAVE_LOCK:
            rows[case] = row
            for check, words in row.get("checks", {}).items():
                print(f"  {check}: {words}", flush=True)
            results.save()

    remaining = sorted((case for case in chosen if case not in rows), key=_case_order)
    with ThreadPoolExecutor(n_jobs) as pool:
        list(pool.map(run, remaining))
    if n_jobs > 1:  # retry what ran out of memory: alone, a case has all of the device
        n_jobs = 1
        for case in [
            case for case in remaining if rows.get(case, {}).get("status") == OUT_OF_MEMORY
        ]:
            del rows[case]
            run(case)
    if n_left := sum(case not in rows for case in chosen):
        print(f"{name}: {n_left} cases are left; repeat the command to continue")
    results.data["parts"][name]["seconds"] += time.monotonic() - started_s
    results.save()


def _case_order(case: str) -> int:
    """Eager cases first, then those that wait for one, so that their plans are searched while the
    rest is timed."""
    words = case.split("/")
    return 0 if words[-1] == "eager" else 1 if len(words) > 2 else 2


def _run_case(
    part: Part, case: str, settings: Settings, earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Run a case in this process. An exception becomes a row, so that other cases still run."""
    try:
        return part.run(case, settings, earlier)
    except Exception as error:  # noqa: BLE001 - every failure is a row
        return {
            "status": "failed",
            "reason": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc().splitlines()[-6:],
        }


def _is_chosen(case: str, only: Sequence[Sequence[str]] | None) -> bool:
    """Whether each group of `--only` has a word of the case's name, or the whole name."""
    words = [*case.split("/"), case]
    return all(any(word in words for word in group) for group in only or ())


def _run_case_in_process(
    part: str,
    case: str,
    earlier: Mapping[str, Any],
    arguments: argparse.Namespace,
    left_s: float,
    *,
    n_jobs: int = 1,
) -> dict[str, Any]:
    """Run a case in a child process, for `--case-minutes` or until `left_s` is over. A crash or a
    timeout becomes a row."""
    limit_s = max(1.0, min(left_s, 60 * arguments.case_minutes))
    options = ["--case", f"{part}:{case}", *(["--full"] if arguments.full else [])]
    variables = _environment_variables(case)
    if n_jobs > 1:
        turn_file = str((arguments.out / "turn").absolute())
        variables[turns.FILE_VARIABLE] = os.environ.get(turns.FILE_VARIABLE, turn_file)
    code, row, errors = _run_child(options, arguments, variables, earlier, limit_s)
    if row is not None:
        return row
    if code is None:
        return {"status": "failed", "reason": f"not done within {limit_s:.0f} s: {errors[-500:]}"}
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return {"status": "failed", "reason": f"{end}: {errors[-900:]}"}


def _environment_variables(case: str) -> dict[str, str]:
    """Environment variables for the case's process; torch reads them once, at its start."""
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if case in BITS_CASES else {}
    if case.endswith(EXPANDABLE):
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return variables


def _run_child(
    options: Sequence[str],
    arguments: argparse.Namespace,
    variables: Mapping[str, str],
    stdin_data: Mapping[str, Any],
    limit_s: float,
) -> tuple[int | None, dict[str, Any] | None, str]:
    """Run this module in a child process: its exit status (None: out of time), the figures that it
    printed (None: none) and its stderr.

    stdin_data: figures of earlier cases, sent to its stdin.

    Compilers start processes of their own, which would hold pipes open. So output goes to files,
    and the whole process group is killed at the time limit.
    """
    command = [
        *(sys.executable, "-m", "benchmarks.gpu", "--out", str(arguments.out)),
        *("--device", arguments.device, "--backend", arguments.backend, *options),
    ]
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        json.dump(stdin_data, stdin)
        stdin.seek(0)
        child = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=out,
            stderr=errors,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        out.seek(0)
        errors.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith(MARK)]
        figures = dict(json.loads(lines[-1].removeprefix(MARK))) if lines else None
        return code, figures, errors.read()


def _query_machine(device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """`machine_of` in a child process: a CUDA context in this process would take GPU memory.

    Raises SystemExit if the device cannot be queried.
    """
    if arguments.in_process or device.type == "cpu":
        return machine_of(device)
    code, machine, errors = _run_child(["--machine"], arguments, {}, {}, 120.0)
    if machine is None:
        raise SystemExit(f"the device {device} cannot be queried ({code}): {errors[-900:]}")
    return machine


def machine_of(device: torch.device) -> dict[str, Any]:
    """Versions and settings. If any of them differs, figures are from another machine."""
    versions = {name: metadata.version(name) for name in ("numpy", "scipy")}
    host = {"python": platform.python_version(), "processor": platform.machine()}
    return {**host, **versions, **circumstances(device)}


def table(part: str, cases: Mapping[str, Any]) -> str:
    """A table of the part's figures, one line per case."""
    columns = PARTS[part].columns.split()
    rows = []
    for case, row in cases.items():
        rows.append([case, *(_cell(column, row.get(column)) for column in columns)])
        if row.get("status") in ("failed", "refused"):
            rows[-1][-1] = f"{row['status']}: {row.get('reason', '')[:60]}"
    return f"\n{PARTS[part].title}\n\n{harness.table(['case', *columns], rows)}"


def _cell(column: str, value: Any) -> str:
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
    parser.add_argument("--minutes", type=float, default=9.0, help="of the command (default: 9)")
    parser.add_argument("--case-minutes", type=float, default=4.0, help="of each case (default: 4)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="cases side by side, a processor core each; each has the device to itself while it is "
        "timed (default: 1)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        action="append",
        metavar="WORD",
        help="cases with one of these words, or called so; given again: of these as well",
    )
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--in-process", action="store_true", help="no process for each case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
