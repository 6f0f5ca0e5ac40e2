"""What the benchmarks share: arguments, the machine they ran on, figures as JSON and tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

Row = dict[str, Any]


def parser(name: str, description: str | None, *, time_limit_s: float | None = None) -> Any:
    """Arguments of `python -m benchmarks.NAME`: --out and, given its default, --time-limit."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=file_to_write, help="write the figures here (JSON)")
    if time_limit_s is not None:
        made.add_argument(
            "--time-limit", type=float, default=time_limit_s, help="seconds of one search"
        )
    return made


def file_to_write(text: str) -> Path:
    """An argument type: a file in a folder that is there, so that no figures are lost later."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; give a file in it")
    return path


def names(known: Collection[str], separator: str = ",") -> Callable[[str], list[str]]:
    """An argument type: some of the known names."""

    def read(text: str) -> list[str]:
        unknown = [name for name in text.split(separator) if name not in known]
        if unknown:
            listed = f"{separator} ".join(known)
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {listed}")
        return text.split(separator)

    return read


def shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def command() -> str:
    """The command line of this process; files outside of the folder that it runs in by their names.

    What lies elsewhere lies elsewhere on another machine.
    """
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", f"benchmarks.{name}", *words])


def circumstances(time_limit_s: float | None = None) -> Row:
    """Command, date, machine and versions of this run; time_limit_s: of one search."""
    cpuinfo = Path("/proc/cpuinfo")  # where Linux has the processor's name
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    titles = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "command": command(),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": next(titles, platform.processor() or platform.machine()),
        "n_cpus": os.cpu_count(),
        "time_limit_s": time_limit_s,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("numpy", "scipy", "torch")},
        },
    }


def read(path: Path | None, part: str) -> Row:
    """The figures of an earlier run, so that a run can be continued; `part` holds their rows."""
    if path is None or not path.exists():
        return {"circumstances": {}, part: {}}
    report: Row = json.loads(path.read_text())
    return report


def measure_each(
    arguments: argparse.Namespace,
    part: str,
    each: Iterable[str],
    figures: Callable[[str], Any],
    markdown: Callable[[Row], str],
    *,
    versions: Collection[str] = (),
) -> Iterator[tuple[str, Row]]:
    """Measure one name after the other; yields each with the report, which has its figures by then.

    arguments: of `parser`. part: of the report, which holds the figures by name.
    versions: of further packages that the figures depend on.

    The report is written after each name, so that a run can go on, and printed without --out.
    """
    report = read(arguments.out, part)
    report["circumstances"] = circumstances(arguments.time_limit)
    report["circumstances"]["versions"] |= {name: metadata.version(name) for name in versions}
    for name in each:
        report[part][name] = figures(name)
        write(arguments.out, report, markdown)
        yield name, report
    if arguments.out is None:
        print(markdown(report))


def run_each(
    arguments: argparse.Namespace,
    part: str,
    rows_of: Mapping[str, Callable[[], Iterable[Row]]],
    *,
    line: Callable[[Row], str],
    faults: Callable[[Row], list[str]],
    markdown: Callable[[Row], str],
    versions: Collection[str] = (),
) -> NoReturn:
    """As `measure_each`, with a list of rows for each name. Exits with 1 where a row has a fault.

    line: a row for the terminal. faults: what is wrong with one.
    """

    def shown(name: str) -> list[Row]:
        found = []
        for row in rows_of[name]():
            found.append(row)
            print(line(row), file=sys.stderr, flush=True)
        return found

    failed = False
    for name, report in measure_each(arguments, part, rows_of, shown, markdown, versions=versions):
        failed = failed or any(map(faults, report[part][name]))
    sys.exit(failed)


def write(path: Path | None, report: Row, markdown: Callable[[Row], str] | None = None) -> None:
    """Write the figures as JSON and, as a table beside it, Markdown. Nothing without a path."""
    if path is None:
        return
    path.write_text(json.dumps(report, indent=1) + "\n")
    if markdown is not None:
        path.with_suffix(".md").write_text(markdown(report))


def without_folders(words: str) -> str:
    """The text, with the names of installed files from their package on."""
    return re.sub(r"/[^\s()]*/site-packages/", "", words)


def ran(report: Row, *, cpus: str = "") -> str:
    """The line of a table's page that says how its figures were made.

    cpus: how many of the CPUs were used, where that matters.
    """
    c = report["circumstances"]
    versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
    machine = f"{c['n_cpus']} CPUs, {cpus}, " if cpus else ""
    note = f"; {c['note']}" if "note" in c else ""  # written by hand, where parts were run later
    return f"`{c['command']}`, {c['date']}, {machine}{versions}{note}."


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    cells = [list(map(str, row)) for row in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])


def percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f}"
