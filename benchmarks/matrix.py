"""Any model, the same bits: models x budgets x steps, each trained with and without its plan.

    python -m benchmarks.matrix --out benchmarks/results/matrix.json
        [--models "GPT-2;VGG"] [--shares 0.7] [--styles plain] [--time-limit S]

A budget's share is its place between the least feasible budget known (0) and the peak of the step
without checkpointing (1). Three optimizer steps are compared: loss, every gradient, every parameter
and buffer, what hooks were handed, and the random state after each step, all to the bit. The last
step is weighed: its peak must be within the budget and agree with the predicted one. The random
states that replays need are in it. Figures are written after each model, so that a run that was
stopped can be continued model by model.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.model_zoo import ZOO, Entry
from benchmarks.plan_quality import circumstances
from benchmarks.same_bits import RATE, compare, trained
from benchmarks.step_styles import STYLES, Seen, Style, Training
from graphs.costs import CostModel, Measured
from graphs.graph import Graph
from graphs.trace import TraceError, trace
from solver.methods import find_obstacle
from solver.schedule import Obstacle, Request, Solution, baseline, simulate
from solver.solving import attempt

SHARES = (1.0, 0.7, 0.4, 0.0)
STYLE_SHARES = (0.4,)
"""Of the styles other than the plain loop."""
CLOSE_SHARE, CLOSE_BYTES = 0.02, 1 << 20
"""A measured peak agrees with the predicted one within the larger of the two."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model prepared for a style, traced, with the plain training that it is compared with."""

    model: nn.Module
    batch: Any
    entry: Entry
    style: Style
    graph: Graph
    expected: list[Seen]

    @functools.cached_property
    def least(self) -> Obstacle:
        """The least budget for which a schedule is found, and that schedule; takes a search."""
        return find_obstacle(self.graph)

    @property
    def least_bytes(self) -> int:
        return self.least.reached_bytes

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Of the step without checkpointing."""
        return simulate(self.graph, baseline(self.graph)).peak_bytes

    def budget_bytes(self, share: float) -> int:
        return self.least_bytes + int(share * (self.peak_bytes - self.least_bytes))


def prepare(entry: Entry, style: Style, *, costs: CostModel | None = None) -> Subject | None:
    """Build, trace and train plainly; None where the style does not apply to the model.

    Raises TraceError with the reason where the step cannot be planned, and AssertionError where
    tracing has left traces.
    """
    model, batch = entry.made()
    if not style.applies(model, batch):
        return None
    if style.prepare is not None:
        model, batch = style.prepare(model, batch)
    optimizer = (
        None
        if style.steps_inside
        else torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=RATE)
    )
    before = Footprint.of(model)
    with style.ambient():
        graph = trace(
            model,
            batch,
            **entry.options,
            optimizer=optimizer,
            gradients=style.gradients,
            costs=costs,
        )
    left = before.changes(Footprint.of(model))
    assert not left, f"tracing has changed {left}"
    plain = Training(copy.deepcopy(model), copy.deepcopy(batch), entry)
    expected, _ = trained(plain, style)
    return Subject(
        model=model,
        batch=batch,
        entry=entry,
        style=style,
        graph=graph,
        expected=expected,
    )


@dataclass(frozen=True)
class Footprint:
    """All that tracing must leave as it was, by name."""

    values: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Footprint:
        values: dict[str, Any] = {"the random state": torch.get_rng_state()}
        for path, module in model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, dict):  # parameters, buffers, modules, hooks
                    value = {key: id(item) for key, item in value.items()}
                values[f"{path}.{attribute}"] = value if isinstance(value, dict) else id(value)
        for name, tensor in model.state_dict().items():
            values[f"the numbers of {name}"] = tensor.clone()
        return cls(values)

    def changes(self, after: Footprint) -> list[str]:
        return [
            name
            for name in {**self.values, **after.values}
            if not _equal(self.values.get(name), after.values.get(name))
        ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def run_budget(subject: Subject, share: float, *, time_limit_s: float) -> Row:
    """Plan for one budget, train with the plan, compare and weigh."""
    budget_bytes = subject.budget_bytes(share)
    began_s = time.perf_counter()
    least = [] if subject.least.schedule is None else [subject.least.schedule]
    request = Request(budget_bytes, time_limit_s=time_limit_s)
    solution = attempt(subject.graph, request, starts=least)
    row = {"share": share, "solve_s": time.perf_counter() - began_s}
    return row | run_solution(subject, solution)


def run_solution(subject: Subject, solution: Solution) -> Row:
    """Train with the plan, compare and weigh."""
    row: Row = {"budget_bytes": solution.request.budget_bytes, "status": solution.status}
    if solution.simulation is None:
        return row
    found = compare(
        subject.model,
        subject.batch,
        subject.entry,
        subject.style,
        solution,
        expected=subject.expected,
    )
    return row | {
        "n_recomputed": solution.simulation.n_recomputed,
        "n_compared": found.n_compared,
        "differences": list(found.differences[:5]),
        "predicted_peak_bytes": solution.simulation.peak_bytes,
        "measured_peak_bytes": found.measured_peak_bytes,
        "own_memory": subject.style.own_memory,
        "own_bytes": subject.style.own_bytes,
    }


def faults(row: Row) -> list[str]:
    """What is wrong with a row, in words; none: it keeps every promise."""
    if "refused" in row:
        return []
    if "failed" in row:
        return [row["failed"]]
    if "measured_peak_bytes" not in row:
        return [f"no plan: {row['status']}"]
    found = list(row["differences"])
    measured, predicted = row["measured_peak_bytes"], row["predicted_peak_bytes"]
    if row["own_memory"]:
        return found
    if measured > row["budget_bytes"] + row.get("own_bytes", 0):
        found.append(f"peak {measured} bytes above the budget of {row['budget_bytes']}")
    off = abs(measured - predicted)
    if off > max(CLOSE_SHARE * predicted, CLOSE_BYTES):
        found.append(f"peak {measured} bytes, predicted were {predicted}")
    return found


def run_model(
    name: str,
    *,
    styles: Sequence[str],
    shares: Sequence[float],
    style_shares: Sequence[float],
    time_limit_s: float,
    costs: CostModel | None,
) -> Iterator[Row]:
    """The rows of one model, as they come."""
    for style in styles:
        began_s = time.perf_counter()
        try:
            subject = prepare(ZOO[name], STYLES[style], costs=costs)
        except TraceError as error:
            yield {"model": name, "style": style, "refused": str(error)}
            continue
        if subject is None:
            continue
        prepared_s = time.perf_counter() - began_s
        about = {
            "model": name,
            "style": style,
            "n_nodes": len(subject.graph.nodes),
            "prepared_s": prepared_s,
            "least_bytes": subject.least_bytes,
            "baseline_peak_bytes": subject.peak_bytes,
        }
        for share in shares if style == "plain" else style_shares:
            try:
                yield about | run_budget(subject, share, time_limit_s=time_limit_s)
            except (RuntimeError, ValueError, AssertionError) as error:
                yield about | {"share": share, "failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    arguments = _arguments()
    report = _read(arguments.out)
    report["circumstances"] = circumstances(arguments.time_limit)
    costs = Measured(torch.device("cpu"))
    failed = False
    for name in arguments.models:
        rows = []
        for row in run_model(
            name,
            styles=arguments.styles,
            shares=arguments.shares,
            style_shares=arguments.style_shares,
            time_limit_s=arguments.time_limit,
            costs=costs,
        ):
            rows.append(row)
            print(line(row), file=sys.stderr, flush=True)
            failed = failed or bool(faults(row))
        report["models"][name] = rows
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            arguments.out.with_suffix(".md").write_text(markdown(report))
    sys.exit(failed)


def line(row: Row) -> str:
    """One row for the terminal."""
    if "refused" in row:
        return f"{row['model']}, {row['style']}: refused: {row['refused']}"
    head = f"{row['model']}, {row['style']}, {row['share']:.0%} ({row['prepared_s']:.0f} s)"
    if "measured_peak_bytes" not in row:
        return f"{head}: {'; '.join(faults(row))}"
    off = row["measured_peak_bytes"] - row["predicted_peak_bytes"]
    spare = row["budget_bytes"] - row["measured_peak_bytes"]
    return (
        f"{head}: {row['status']} in {row['solve_s']:.1f} s, {row['n_recomputed']} again, "
        f"measured - predicted {off:+d}, to spare {spare}; {'; '.join(faults(row)) or 'same bits'}"
    )


def markdown(report: Row) -> str:
    rows = [row for rows in report["models"].values() for row in rows]
    run = [row for row in rows if "refused" not in row]
    c = report["circumstances"]
    versions = ", ".join(f"{name} {version}" for name, version in c["versions"].items())
    parts = [
        "# Any model, the same bits",
        f"`{c['command']}`, {c['date']}, {versions}.",
        _SUMMARY.format(
            n_cells=len(run),
            n_compared=sum(row.get("n_compared", 0) for row in run),
            n_wrong=sum(bool(faults(row)) for row in run),
            n_refused=len(rows) - len(run),
        ),
        "| model | step | ops | budget | MB | again | predicted MB | measured MB | |\n"
        "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(map(_cells, rows)),
    ]
    return "\n\n".join(parts) + "\n"


_SUMMARY = (
    "{n_cells} cells, {n_compared} tensors compared to the bit, {n_wrong} cells with a fault, "
    "{n_refused} refused by name. A cell: three optimizer steps with the plan and without; losses, "
    "gradients, parameters, buffers, what hooks saw and the random state are the same bits, the "
    "measured peak is within the budget and within 2 % or 1 MiB of the predicted one. The budget's "
    "share is its place between the least feasible budget found (0 %) and the peak without "
    "checkpointing (100 %)."
)


def _cells(row: Row) -> str:
    if "refused" in row:
        return f"| {row['model']} | {row['style']} | | | | | | | refused: {row['refused']} |"
    verdict = "; ".join(faults(row)) or "same bits"
    if row.get("own_memory"):
        verdict += " (the step takes memory of its own)"
    values = [
        row["model"],
        row["style"],
        row["n_nodes"],
        f"{row['share']:.0%}",
        _mb(row.get("budget_bytes")),
        row.get("n_recomputed", ""),
        _mb(row.get("predicted_peak_bytes")),
        _mb(row.get("measured_peak_bytes")),
        verdict,
    ]
    return "| " + " | ".join(map(str, values)) + " |"


def _mb(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 1e6:.2f}"


def _read(path: Path | None) -> Row:
    if path is None or not path.exists():
        return {"circumstances": {}, "models": {}}
    report: Row = json.loads(path.read_text())
    return report


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix")
    parser.add_argument("--out", type=Path, help="write the figures here (JSON), a table beside it")
    parser.add_argument("--models", type=_of(ZOO), default=list(ZOO), help="; ".join(ZOO))
    parser.add_argument("--styles", type=_of(STYLES), default=list(STYLES), help="; ".join(STYLES))
    parser.add_argument("--shares", type=_shares, default=SHARES, help="of the plain loop")
    parser.add_argument("--style-shares", type=_shares, default=STYLE_SHARES, help="of the others")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of one search")
    return parser.parse_args()


def _of(known: dict[str, Any]) -> Any:
    """Names separated by semicolons (some have commas)."""

    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(";") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {'; '.join(known)}")
        return text.split(";")

    return names


def _shares(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


if __name__ == "__main__":
    main()
