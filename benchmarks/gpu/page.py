"""Write the Markdown page and the plots of the committed figures of a GPU.

    python -m benchmarks.gpu.page benchmarks/results/gpu_h200.json --plots docs

The page is written next to the figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.gpu.__main__ import table
from benchmarks.gpu.picture import draw


def page(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    names = ("torch", "cuda", "cudnn", "driver", "python", "numpy", "scipy")
    versions = ", ".join(f"{name} {machine[name]}" for name in names)
    lines = [f"# {machine['card']}", "", f"{report['date']}, {versions}; {report['note']}.", ""]
    for run in report["runs"]:
        lines += [f"## {run['title']}", ""]
        lines += [f"{run['note']}.", ""] if "note" in run else []
        for name, part in run["parts"].items():
            lines += [*(f"`{command}`" for command in part["commands"]), ""]
            rows = TABLES[name](part["cases"]) if name in TABLES else [table(name, part["cases"])]
            lines += [*rows, ""]
        lines += [f"{run['tests_of_plans']}.", ""] if "tests_of_plans" in run else []
    lines += _steps_section(report["steps"]) + _traced_without_card(
        report["traced_without_the_card"]
    )
    return "\n".join(lines)


def _smoke_table(cases: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, row["n_held"], row["n_failed"]) for name, row in cases.items()]
    yield harness.table(("group of tests", "hold", "fail"), rows)


def _costs_table(cases: Mapping[str, Any]) -> Iterator[str]:
    columns = ("measured_s", "roofline_s", "step_s")
    rows = [
        (name, *(f"{1e3 * row[column]:.1f} ms" for column in columns), row.get("note", ""))
        for name, row in cases.items()
    ]
    head = ("model", "sum of measured operators", "roofline", "step in eager mode", "")
    yield harness.table(head, rows)


def _ways_table(cases: Mapping[str, Any]) -> Iterator[str]:
    yield harness.table(
        (
            *("model", "way", "share", "budget", "peak", "predicted", "error", "reserved"),
            *("step", "overhead", "planned", "bound", "predicted step"),
        ),
        [_way_cells(case, row) for case, row in sorted(cases.items())],
    )


def _way_cells(case: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    model, way, *share = case.split("/")
    has_budget = bool(share)
    start = (model, way, share[0] if share else "", _gb(row["budget_bytes"]) if has_budget else "")
    if row["status"] != "ran":
        reason = row.get("reason", row["status"])
        return (*start, *[""] * 8, reason)
    predicted = row.get("predicted_bytes")
    return (
        *start,
        _gb(row["peak_bytes"]),
        "" if predicted is None else _gb(predicted),
        _percent(row.get("peak_off"), "+.3f"),
        _gb(row["reserved_bytes"]),
        f"{1e3 * row['time_s']:.1f} ms",
        _percent(row.get("measured_overhead"), "+.1f"),
        _percent(row.get("overhead"), "+.1f"),
        _percent(row.get("bound"), "+.1f"),
        _percent(row.get("time_off"), "+.1f"),
    )


def _steps_section(steps: Mapping[str, Any]) -> list[str]:
    rows = []
    for model, figures in steps["models"].items():
        for way in ("eager", "ours"):
            if way in figures:
                row = figures[way]
                times = (row.get(name) for name in ("alone_s", "in_row_s", "kernels_s", "host_s"))
                shown = ("" if t is None else f"{1e3 * t:.1f} ms" for t in times)
                rows.append((model, way, *shown, row.get("n_kernels", "")))
    head = ("model", "way", "step, waited for", "in a row", "kernels", "host", "kernels (number)")
    costs = [
        (model, *(f"{1e3 * figures['costs_s'][kind]:.1f} ms" for kind in ("hot", "cold", "normal")))
        for model, figures in steps["models"].items()
    ]
    return [
        *(f"## {steps['title']}", "", harness.table(head, rows), ""),
        *(f"{steps['note'].capitalize()}.", ""),
        *(harness.table(("model", "hot", "cold", "normal"), costs), ""),
    ]


def _traced_without_card(found: Mapping[str, Any]) -> list[str]:
    rows = [(n, r["n_operators"], r["n_differences"]) for n, r in found["models"].items()]
    return [
        *("## Steps traced without the card", "", f"`{found['command']}`: {found['note']}.", ""),
        harness.table(("model", "operators", "differences"), rows),
        "",
    ]


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.3f} GB"


def _percent(value: float | None, form: str) -> str:
    return "" if value is None else f"{100 * value:{form}} %"


def _fullest_cases(report: Mapping[str, Any]) -> dict[str, Any]:
    """For each model, the cases of the run that has the most cases of it."""
    by_model: dict[str, dict[str, Any]] = {}
    for run in report["runs"]:
        cases = run["parts"].get("ways", {}).get("cases", {})
        for model in {case.split("/")[0] for case in cases}:
            own = {case: row for case, row in cases.items() if case.split("/")[0] == model}
            by_model[model] = max(own, by_model.get(model, {}), key=len)
    return {case: row for cases in by_model.values() for case, row in cases.items()}


TABLES = {"smoke": _smoke_table, "costs": _costs_table, "ways": _ways_table}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.page", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("report", type=Path)
    parser.add_argument("--plots", type=Path, help="folder for plots of throughput and peak")
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text())
    arguments.report.with_suffix(".md").write_text(page(report))
    if arguments.plots is not None:
        draw(_fullest_cases(report), arguments.plots, prefix=f"{arguments.report.stem}-")


if __name__ == "__main__":
    main()
