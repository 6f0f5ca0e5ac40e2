"""Plans for steps that differentiate a gradient, compared with a checkpoint around every layer.

    python -m benchmarks.derivatives --out benchmarks/results/derivatives.json
        [--models "force field,meta-learning"] [--shares 0.5,0.25,0] [--rounds N]

`forward` of these models calls `torch.autograd.grad(..., create_graph=True)`. Peaks are measured on
the CPU: the highest sum of all tensors during a step, without an optimizer. A budget given as a
share lies between the smallest budget known to be feasible (0) and the peak without a plan (1).
Times are those of `step_time`: medians of ratios to the step without a plan in the same round.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import Row, percent
from benchmarks.step_time import measure_rounds
from benchmarks.zoo.derivatives import MODELS, with_checkpoints
from scheduler_runtime import apply
from scheduler_runtime.measuring import measure
from solver import solve
from solver.schedule import Solution

SHARES = (0.5, 0.25, 0.0)
PLAIN, LAYERS = "no plan", "every layer"


def main() -> None:
    parser = harness.parser("derivatives", __doc__, time_limit_s=30.0)
    parser.add_argument("--models", type=harness.names(MODELS), default=list(MODELS))
    parser.add_argument("--shares", type=harness.shares, default=SHARES)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    harness.run_each(
        arguments,
        "models",
        {name: functools.partial(_rows, name, arguments) for name in arguments.models},
        line=_line,
        faults=_faults,
        markdown=markdown,
    )


def _rows(name: str, arguments: Any) -> Iterator[Row]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    free = solve(model, batch, budget="100GB")
    solutions = {
        f"plan, {100 * share:.0f} %": _planned(free, share, arguments.time_limit)
        for share in arguments.shares
    }
    models = {PLAIN: copy.deepcopy(model), LAYERS: with_checkpoints(name, model)}
    for title, solution in solutions.items():
        models[title] = apply(copy.deepcopy(model), solution)
    expected = _results(models[PLAIN], batch)
    seconds = measure_rounds(models, batch, arguments.rounds)
    for title, each in models.items():
        ratios = [s / p for s, p in zip(seconds[title], seconds[PLAIN], strict=True)]
        found = solutions.get(title)
        predicted = free.baseline if title == PLAIN else found and found.simulation
        yield {
            "model": name,
            "way": title,
            "n_nodes": len(free.graph.nodes),
            "measured_peak_bytes": measure(each, batch, n_steps=1).peak_bytes,
            "predicted_peak_bytes": predicted and predicted.peak_bytes,
            "overhead": found and found.overhead,
            "gap": found and found.gap,
            "measured_overhead": statistics.median(ratios) - 1,
            "is_identical": _are_identical(expected, _results(each, batch)),
        }


def _planned(free: Solution, share: float, time_limit_s: float) -> Solution:
    least = solve(free.graph, budget=1).minimum_budget_bytes
    assert least is not None
    budget = int(least + share * (free.baseline.peak_bytes - least))
    return solve(free.graph, budget=budget, time_limit_s=time_limit_s)


def _results(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]


def _are_identical(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


def _faults(row: Row) -> list[str]:
    """What is wrong with a plan, or with what is predicted for the step without one."""
    if row["way"] == LAYERS:
        return []
    found = [] if row["is_identical"] else ["other bits"]
    more = 1.0005 if row["way"] == PLAIN else 1  # scalars
    if row["measured_peak_bytes"] > more * row["predicted_peak_bytes"]:
        found.append("above the prediction")
    return found


def _line(row: Row) -> str:
    return ", ".join([row["model"], row["way"], _cell(row), *_faults(row)])


def _cell(row: Row) -> str:
    peak = f"{row['measured_peak_bytes'] / 1e6:.1f} MB"
    if row["way"] == PLAIN:
        return peak
    bits = "" if row["is_identical"] else ", other bits"
    return f"{peak}, {100 * row['measured_overhead']:+.0f} %{bits}"


def markdown(report: Row) -> str:
    """A line for each model: measured peak and overhead of each way; the gaps of the plans."""
    ways = [row["way"] for row in next(iter(report["models"].values()))]
    cells = (
        [
            name,
            rows[0]["n_nodes"],
            *map(_cell, rows),
            ", ".join(percent(row["gap"]) for row in rows if row["gap"] is not None),
        ]
        for name, rows in report["models"].items()
    )
    return harness.table(["", "ops", *ways, "gaps of the plans, points"], cells) + "\n"


if __name__ == "__main__":
    main()
