"""How good plans are, and how long they take: `auto` and the others over graphs and budgets.

    python -m benchmarks.plan_quality --out benchmarks/results/plan_quality.json
        [--graphs gpt2,unet] [--shares 0.9,0.5] [--time-limit S]

A budget's share is its place between the least feasible budget known (0) and the peak of the step
without checkpointing (1). For each graph and share: `auto`'s schedule by the judge, its proven
bound, and beside it in the same run the other methods of ours and what PyTorch's partitioner saves
(`benchmarks.peers`). Everything is judged by `solver.simulate`. The figures are written as JSON
after each graph, so a run that is stopped can be continued, and as a Markdown table beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.quality_graphs import SUBJECTS, Subject
from graphs.graph import Graph
from solver.methods import METHODS, find_obstacle
from solver.schedule import Schedule, baseline, simulate

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
OTHERS = ("every_block", "sqrt", "dp")
PEERS_TIME_LIMIT_S = 120.0
"""For all of the partitioner's sets of one graph."""
TARGET_GAP = 0.001
"""Of the baseline's time, at shares of a half and more."""
DEEP_TARGET_GAP = 0.01
"""Of the baseline's time, below that."""

Row = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    report: Row = _read(arguments.out)
    report["circumstances"] = circumstances(arguments.time_limit)
    for name in arguments.graphs:
        subject = SUBJECTS[name]()
        report["graphs"][name] = measure_graph(
            name, subject, shares=arguments.shares, time_limit_s=arguments.time_limit
        )
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            arguments.out.with_suffix(".md").write_text(markdown(report))
    if arguments.out is None:
        print(markdown(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_quality")
    parser.add_argument("--out", type=Path, help="write the figures here (JSON), a table beside it")
    parser.add_argument("--graphs", type=_names, default=list(SUBJECTS), help=", ".join(SUBJECTS))
    parser.add_argument("--shares", type=_shares, default=SHARES)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of one search")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in SUBJECTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SUBJECTS)}")
    return text.split(",")


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def _read(path: Path | None) -> Row:
    if path is None or not path.exists():
        return {"circumstances": {}, "graphs": {}}
    report: Row = json.loads(path.read_text())
    return report


def circumstances(time_limit_s: float) -> Row:
    """Command, date, machine and versions of this run."""
    return {
        "command": shlex.join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        ),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": platform.processor() or platform.machine(),
        "n_cpus": os.cpu_count(),
        "time_limit_s": time_limit_s,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("numpy", "scipy", "torch")},
        },
    }


def measure_graph(
    name: str, subject: Subject, *, shares: Sequence[float], time_limit_s: float
) -> Row:
    """All rows of one graph; told on stderr as they come."""
    graph = subject.graph
    began_s = time.perf_counter()
    least = find_obstacle(graph)
    least_s = time.perf_counter() - began_s
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    print(
        f"{name}: {len(graph.nodes)} ops, least {least.reached_bytes / 1e9:.3f} GB (proven "
        f"{least.proven_bytes / 1e9:.3f}) in {least_s:.1f} s",
        file=sys.stderr,
    )
    partitioned = (
        {}
        if subject.step is None
        else peers.partitioned(subject.step, time_limit_s=PEERS_TIME_LIMIT_S)
    )
    rows = []
    for share in shares:
        budget_bytes = least.reached_bytes + int(share * (peak_bytes - least.reached_bytes))
        row = measure_budget(
            graph, budget_bytes, partitioned=partitioned, time_limit_s=time_limit_s
        )
        rows.append({"share": share, "budget_bytes": budget_bytes, **row})
        print(f"  {share:.1f}: {_line(rows[-1])}", file=sys.stderr, flush=True)
    return {
        "n_nodes": len(graph.nodes),
        "n_forward": len(graph.forward_nodes),
        "time_limit_s": time_limit_s,
        "least_proven_bytes": least.proven_bytes,
        "least_reached_bytes": least.reached_bytes,
        "least_s": least_s,
        "baseline_peak_bytes": peak_bytes,
        "rows": rows,
    }


def measure_budget(
    graph: Graph, budget_bytes: int, *, partitioned: peers.Traces, time_limit_s: float
) -> Row:
    """auto's figures at one budget, and the overheads of the others."""
    options = {"budget_bytes": budget_bytes, "time_limit_s": time_limit_s, "seed": 0}
    began_s = time.perf_counter()
    proposal = METHODS["auto"](graph, **options)  # type: ignore[arg-type]
    seconds = time.perf_counter() - began_s
    bound = proposal.lower_bound_s / graph.baseline_time_s - 1.0
    peak_bytes, overhead = _judged(graph, proposal.schedule)
    others = {}
    for method in OTHERS:
        found = METHODS[method](graph, **options)  # type: ignore[arg-type]
        others[method] = _judged(graph, found.schedule)[1]
    others |= {
        name: peers.best_overhead(graph, traces, budget_bytes=budget_bytes)
        for name, traces in partitioned.items()
    }
    return {
        "peak_bytes": peak_bytes,
        "overhead": overhead,
        "bound": bound,
        "gap": None if overhead is None else max(0.0, overhead - bound),
        "seconds": seconds,
        "timed_out": proposal.timed_out,
        "others": others,
    }


def _judged(graph: Graph, schedule: Schedule | None) -> tuple[int | None, float | None]:
    if schedule is None:
        return None, None
    simulation = simulate(graph, schedule)
    return simulation.peak_bytes, simulation.time_s / graph.baseline_time_s - 1.0


def _line(row: Row) -> str:
    late = ", time limit" if row["timed_out"] else ""
    return (
        f"{_percent(row['overhead'])} bound {_percent(row['bound'])} gap {_percent(row['gap'])} "
        f"{row['seconds']:.1f} s{late}"
    )


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f}"


def missed(row: Row) -> bool:
    """Whether the gap is above what is aimed at for the row's share."""
    target = TARGET_GAP if row["share"] >= 0.5 else DEEP_TARGET_GAP
    return row["gap"] is None or row["gap"] > target


def markdown(report: Row) -> str:
    """The tables: `auto` by graph and share, then every other method's overhead beside it."""
    parts = [_head(report), _gaps(report), _misses(report)]
    for name, found in report["graphs"].items():
        parts.append(_details(name, found))
    return "\n\n".join(parts) + "\n"


def _head(report: Row) -> str:
    c = report["circumstances"]
    versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
    note = f"; {c['note']}" if "note" in c else ""  # written by hand, where parts were run again
    return (
        f"# Quality of plans\n\n`{c['command']}`, {c['date']}, {c['n_cpus']} CPUs, one used, "
        f"{versions}{note}. Overhead, bound and gap in percent of the step without checkpointing."
    )


def _gaps(report: Row) -> str:
    """Gap (and seconds) by graph and share."""
    shares = sorted(
        {r["share"] for g in report["graphs"].values() for r in g["rows"]}, reverse=True
    )
    lines = [
        "## Gap, and seconds of the search",
        "",
        _cells("graph", "ops", *shares),
        _rule(2 + len(shares)),
    ]
    for name, found in report["graphs"].items():
        rows = {row["share"]: row for row in found["rows"]}
        cells = [
            f"{_percent(rows[s]['gap'])} ({rows[s]['seconds']:.1f} s)" if s in rows else ""
            for s in shares
        ]
        lines.append(_cells(name, found["n_nodes"], *cells))
    return "\n".join(lines)


def _misses(report: Row) -> str:
    cells = [
        f"{name} at {row['share']}: {_percent(row['gap'])} ({_end(row)})"
        for name, found in report["graphs"].items()
        for row in found["rows"]
        if missed(row)
    ]
    n_cells = sum(len(found["rows"]) for found in report["graphs"].values())
    aim = "0.1 points at shares of a half and more, 1 point below"
    return f"Above the aim ({aim}): {len(cells)} of {n_cells}: {'; '.join(cells) or 'none'}."


def _end(row: Row) -> str:
    """What ended the search before the gap closed."""
    return "the clock ended the search" if row["timed_out"] else "its limits on work were reached"


def _details(name: str, found: Row) -> str:
    others = list(found["rows"][0]["others"])
    gb = {key: f"{size / 1e9:.3f} GB" for key, size in found.items() if key.endswith("_bytes")}
    sizes = (
        f"{found['n_nodes']} ops, {found['n_forward']} of them forward; least budget "
        f"{gb['least_reached_bytes']}, proven {gb['least_proven_bytes']} ({found['least_s']:.1f} "
        f"s); peak without checkpointing {gb['baseline_peak_bytes']}."
    )
    lines = [
        f"## {name}",
        "",
        sizes,
        "",
        _cells("share", "budget GB", "peak GB", "bound", "auto", *others, "seconds"),
        _rule(6 + len(others)),
    ]
    for row in found["rows"]:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.3f}"
        lines.append(
            _cells(
                row["share"],
                f"{row['budget_bytes'] / 1e9:.3f}",
                peak,
                _percent(row["bound"]),
                _percent(row["overhead"]),
                *(_percent(row["others"].get(other)) for other in others),
                f"{row['seconds']:.1f}",
            )
        )
    return "\n".join(lines)


def _cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def _rule(n_columns: int) -> str:
    return "|" + "---|" * n_columns


if __name__ == "__main__":
    main()
