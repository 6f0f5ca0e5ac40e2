"""Train models with and without plans, and check bits and peaks: models x budgets x kinds of steps.

    python -m benchmarks.matrix --out benchmarks/results/matrix.json
        [--models "GPT-2;VGG"] [--shares 0.7] [--styles plain] [--time-limit S] [--host RATE]

Plans are made of the step with the rewrites that keep all bits, to test these as often as possible.
(`solve` by default also plans the step without rewrites; this does so only if no rewrite applies.)
A budget given as a share lies between the least budget that was found (0) and the peak of the plain
step without checkpointing (1). After each of three optimizer steps, loss, gradients, parameters,
buffers, the tensors that hooks get and the random state are compared bitwise. The memory of the
last step is measured: its peak, with the random states that are kept for recomputation, must be
within the budget and agree with the predicted peak. Figures are written after each model, so that a
run that was stopped can be continued.

With --host, plans may also copy to a host with unlimited memory, at this rate in each direction.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.same_bits import RATE, compare, trained
from benchmarks.step_styles import STYLES, Seen, Style, Training, autocast_to
from benchmarks.zoo import ZOO, Entry
from graphs.costs import CostModel, Measured
from graphs.graph import Graph
from graphs.rewrites import Variants
from graphs.trace import TraceError, trace_variants
from solver.methods import find_obstacle
from solver.schedule import (
    Link,
    Obstacle,
    Place,
    Places,
    Request,
    Solution,
    baseline,
    simulate,
)
from solver.sizes_deadlines_progress import parse_rate
from solver.solving import attempt

SHARES = (1.0, 0.7, 0.4, 0.0)
STYLE_SHARES = (0.4,)
"""Shares of the budget for the styles other than the plain loop."""
HOST_BYTES = 10**13
CLOSE_SHARE, CLOSE_BYTES = 0.02, 1 << 20
"""How far a measured peak may be from the predicted one: this share of it or these bytes, whichever
is more."""


@dataclass(frozen=True)
class Subject:
    """A model prepared for a style and traced, with the results of training it without a plan."""

    model: nn.Module
    batch: Any
    entry: Entry
    style: Style
    steps: Variants
    expected: list[Seen]

    @property
    def rewritten(self) -> Graph:
        """The variant of the step with the most rewrites."""
        return self.steps.planned[-1]

    @functools.cached_property
    def least_budget(self) -> Obstacle:
        """The least budget for which a schedule is found, and that schedule; takes a search."""
        obstacles = map(find_obstacle, self.steps.planned)
        return min(obstacles, key=lambda obstacle: obstacle.reached_bytes)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """The peak of the plain step without checkpointing."""
        return simulate(self.steps.plain, baseline(self.steps.plain)).peak_bytes

    def budget_bytes(self, share: float) -> int:
        least_bytes = self.least_budget.reached_bytes
        return least_bytes + int(share * (self.peak_bytes - least_bytes))


def prepare(entry: Entry, style: Style, *, costs: CostModel | None = None) -> Subject | None:
    """Build and trace a model, and train it without a plan. None if the style does not apply to it.

    Raises TraceError if the step cannot be planned, and AssertionError if tracing has changed the
    model or the random state.
    """
    model, batch = entry.model_and_batch()
    if not style.applies(model, batch):
        return None
    if style.prepare is not None:
        model, batch = style.prepare(model, batch)
    trainable = (p for p in model.parameters() if p.requires_grad)
    optimizer = None if style.steps_inside else torch.optim.AdamW(trainable, lr=RATE)
    before = footprint(model)
    options = entry.options | {"optimizer": optimizer, "gradients": style.gradients}
    with autocast_to(style.autocast):
        steps = with_rewrites(trace_variants(model, batch, **options, costs=costs))
    changed = changes(before, footprint(model))
    assert not changed, f"tracing has changed {changed}"
    expected, _ = trained(Training(copy.deepcopy(model), copy.deepcopy(batch), entry), style)
    return Subject(model, batch, entry, style, steps, expected)


def with_rewrites(steps: Variants) -> Variants:
    """Plan only the variants with rewrites, if there are any."""
    changed = tuple(graph for graph in steps.planned if graph.meta.rewrites)
    return Variants(steps.plain, changed or steps.planned)


def footprint(model: nn.Module) -> dict[str, Any]:
    """Everything that tracing must not change, by name."""
    values: dict[str, Any] = {"the random state": torch.get_rng_state()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            values[f"{path}.{attribute}"] = (
                # parameters, buffers, modules, hooks
                {key: id(item) for key, item in value.items()}
                if isinstance(value, dict)
                else id(value)
            )
    for name, tensor in model.state_dict().items():
        values[f"the numbers of {name}"] = tensor.clone()
    return values


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of the values that differ between two footprints."""

    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.equal(one, other)
        return bool(one == other)

    names = {**before, **after}
    return [name for name in names if not equal(before.get(name), after.get(name))]


def run_budget(
    subject: Subject, share: float, *, time_limit_s: float, places: Places | None = None
) -> Row:
    """Plan for one budget, train with the plan, and return the row of `run_solution`."""
    budget_bytes = subject.budget_bytes(share)
    began_s = time.perf_counter()
    least = [] if subject.least_budget.schedule is None else [subject.least_budget.schedule]
    request = Request(
        budget_bytes,
        time_limit_s=time_limit_s,
        rewrites="bitwise",
        places=places,
        optimizer_state="device",  # the trainings that are compared make their own optimizers
    )
    solution = attempt(subject.steps, request, starts=least)
    row = {"share": share, "solve_s": time.perf_counter() - began_s}
    return row | run_solution(subject, solution)


def run_solution(subject: Subject, solution: Solution) -> Row:
    """Train with the plan, compare with the training without it, and measure the peak."""
    row: Row = {"budget_bytes": solution.request.budget_bytes, "status": solution.status}
    if solution.simulation is None:
        return row
    setting = (subject.model, subject.batch, subject.entry, subject.style)
    comparison = compare(*setting, solution, expected=subject.expected)
    return row | {
        "rewrites": list(solution.graph.meta.rewrites),
        "n_recomputed": solution.simulation.n_recomputed,
        "host_peak_bytes": solution.simulation.host_peak_bytes,
        "n_compared": comparison.n_compared,
        "differences": list(comparison.differences[:5]),
        "predicted_peak_bytes": solution.simulation.peak_bytes,
        "measured_peak_bytes": comparison.measured_peak_bytes,
        "own_bytes": subject.style.own_bytes(subject.model),
    }


def faults(row: Row) -> list[str]:
    """What is wrong with a row, in words; an empty list if nothing is.

    Peaks of older rows with `own_memory` are not checked: copies made by the benchmark are in them.
    """
    if "refused" in row:
        return []
    if "failed" in row:
        return [row["failed"]]
    if "measured_peak_bytes" not in row:
        return [f"no plan: {row['status']}"]
    return [*row["differences"], *([] if row.get("own_memory") else peak_faults(row))]


def peak_faults(row: Row) -> list[str]:
    """Whether the measured peak is above the budget or far from the predicted one, in words.

    Both may be exceeded by `own_bytes` of the row's style.
    """
    found = []
    measured, predicted = row["measured_peak_bytes"], row["predicted_peak_bytes"]
    own_bytes, close_bytes = row.get("own_bytes", 0), max(CLOSE_SHARE * predicted, CLOSE_BYTES)
    if measured > row["budget_bytes"] + own_bytes:
        found.append(f"peak {measured} bytes above the budget of {row['budget_bytes']}")
    if not -close_bytes <= measured - predicted <= own_bytes + close_bytes:
        found.append(f"peak {measured} bytes, predicted {predicted}")
    return found


def run_model(name: str, arguments: Any, costs: CostModel | None) -> Iterator[Row]:
    """Yield the rows of one model, for each style and share of the budget."""
    host = arguments.host and Place(HOST_BYTES, Link(arguments.host, arguments.host))
    places = Places(host=host) if host else None
    for style in arguments.styles:
        began_s = time.perf_counter()
        try:
            subject = prepare(ZOO[name], STYLES[style], costs=costs)
        except TraceError as error:
            yield {"model": name, "style": style, "refused": str(error)}
            continue
        if subject is None:
            continue
        labels = {
            "model": name,
            "style": style,
            "n_nodes": len(subject.steps.plain.nodes),
            "prepared_s": time.perf_counter() - began_s,
            "least_bytes": subject.least_budget.reached_bytes,
            "baseline_peak_bytes": subject.peak_bytes,
        }
        for share in arguments.shares if style == "plain" else arguments.style_shares:
            try:
                yield labels | run_budget(
                    subject, share, time_limit_s=arguments.time_limit, places=places
                )
            except (RuntimeError, ValueError, AssertionError) as error:
                yield labels | {"share": share, "failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = harness.parser("matrix", __doc__, time_limit_s=20.0)
    # Separated by semicolons, since some names have commas.
    parser.add_argument("--models", type=harness.names(ZOO, ";"), default=list(ZOO))
    parser.add_argument("--styles", type=harness.names(STYLES, ";"), default=list(STYLES))
    parser.add_argument("--shares", type=harness.shares, default=SHARES, help="of the plain loop")
    parser.add_argument(
        "--style-shares", type=harness.shares, default=STYLE_SHARES, help="of the others"
    )
    parser.add_argument(
        "--host",
        type=functools.partial(parse_rate, what="--host"),
        help="of copies, such as 10GB/s",
    )
    arguments = parser.parse_args()
    costs = Measured(torch.device("cpu"))
    rows_of = {n: functools.partial(run_model, n, arguments, costs) for n in arguments.models}
    harness.run_each(arguments, "models", rows_of, line=line, faults=faults, markdown=markdown)


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
        f"{head}: {row['status']} in {row['solve_s']:.1f} s, {row['n_recomputed']} recomputed, "
        f"{'+'.join(row['rewrites']) or 'no rewrites'}, "
        f"measured - predicted {off:+d}, to spare {spare}; "
        f"{'; '.join(faults(row)) or 'bitwise identical'}"
    )


_SUMMARY = (
    "{n_cells} cells, {n_compared} tensors compared bitwise, {n_wrong} cells with a fault, "
    "{n_refused} refused by name; {n_rewritten} of the plans have rewrites, {n_copied} copy to the "
    "host. A cell: three optimizer steps with the plan and without; losses, gradients, parameters, "
    "buffers, what hooks saw and the random state are bitwise identical, the measured peak is "
    "within the budget and within 2 % or 1 MiB of the predicted one. The budget's share is its "
    "place between the least budget found (0 %) and the plain step's peak without checkpointing "
    "(100 %)."
)


_COLUMNS = (
    *("model", "step", "ops", "budget", "MB", "rewrites", "recomputed"),
    *("host MB", "predicted MB", "measured MB", ""),
)


def markdown(report: Row) -> str:
    rows = [row for rows in report["models"].values() for row in rows]
    run = [row for row in rows if "refused" not in row]
    parts = [
        "# Any model, bitwise identical",
        harness.ran(report),
        _SUMMARY.format(
            n_cells=len(run),
            n_compared=sum(row.get("n_compared", 0) for row in run),
            n_wrong=sum(bool(faults(row)) for row in run),
            n_refused=len(rows) - len(run),
            n_rewritten=sum(bool(row.get("rewrites")) for row in run),
            n_copied=sum(bool(row.get("host_peak_bytes")) for row in run),
        ),
        harness.table(_COLUMNS, map(_cells, rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[object]:
    if "refused" in row:
        return [row["model"], row["style"], *[""] * 8, f"refused: {row['refused']}"]
    result = "; ".join(faults(row)) or "bitwise identical"
    if row.get("own_memory"):
        result += " (its peak is not checked: copies of what hooks saw are in it)"
    elif row.get("own_bytes", 0) > CLOSE_BYTES:
        result += f" (up to {row['own_bytes'] / 1e6:.2f} MB are the loop's own)"
    mb = [
        f"{row[key] / 1e6:.2f}" if key in row else ""
        for key in (
            "budget_bytes",
            "host_peak_bytes",
            "predicted_peak_bytes",
            "measured_peak_bytes",
        )
    ]
    about = [row["model"], row["style"], row["n_nodes"], f"{row['share']:.0%}"]
    changes = [", ".join(row.get("rewrites", [])), row.get("n_recomputed", "")]
    return [*about, mb[0], *changes, *mb[1:], result]


if __name__ == "__main__":
    main()
