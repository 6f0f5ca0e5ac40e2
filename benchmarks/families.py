"""Families of the transformers library through `fit`: the same bits, within the budget.

    python -m benchmarks.families --out benchmarks/results/families.json
        [--families "gpt2;t5"] [--time-limit S]

Each family is trained as `test_training` of transformers' own tests trains it: a tiny model built
from its configuration class, in training mode, called with ids, masks (ones, and rows of different
lengths), labels or pixels. The budget is half of the activation range: in the middle between the
least budget that is found (0) and the peak of the plain step (1), with rewrites. Three optimizer
steps are compared with plain training: loss, every gradient, every parameter and buffer, and the
random state, all bitwise; torch's, Python's and NumPy's generators start alike at each step. The
memory of the last step is measured. A row ends in one of three ways: planned, planned with parts
as single pieces, or refused with the message that a user reads. Figures are written after each
family, so that a run that was stopped can be continued.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
import sys
import time
import warnings
from collections.abc import Iterator
from importlib import metadata

import numpy
import torch

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.matrix import CLOSE_SHARE, Subject, changes, footprint
from benchmarks.same_bits import RATE, trained
from benchmarks.step_styles import STYLES, Style, Training
from benchmarks.zoo import LOSS_INSIDE
from benchmarks.zoo.families import FAMILIES, Family
from graphs.trace import TraceError, trace_variants
from scheduler_runtime import FitError, fit, plans_of
from scheduler_runtime.verifying import differences
from solver.common import counted

SHARE = 0.5


def _seeded(training: Training) -> None:
    """A step; some models draw from NumPy's and Python's generators."""
    random.seed(0)
    numpy.random.seed(0)
    STYLES["plain"].step(training)


PLAIN = dataclasses.replace(STYLES["plain"], step=_seeded)


def run(family: Family, batch_name: str, *, time_limit_s: float) -> Row:
    """One batch of a family: how it ends, and what was measured."""
    model, batch = family.made(batch_name)
    plain = Training(copy.deepcopy(model), copy.deepcopy(batch), LOSS_INSIDE)
    expected, _ = trained(plain, PLAIN)
    before = footprint(model)
    began_s = time.perf_counter()
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        steps = trace_variants(model, batch, optimizer=optimizer)
    except TraceError as error:
        return {"refused": str(error), "changed": changes(before, footprint(model))}
    subject = Subject(model, batch, LOSS_INSIDE, PLAIN, steps, expected)
    return {
        "n_nodes": len(steps.plain.nodes),
        "opaque": steps.plain.meta.environment.get("opaque", []),
        "resident_bytes": steps.plain.resident_bytes,
        "least_bytes": subject.least.reached_bytes,
        "plain_peak_bytes": subject.peak_bytes,
        "budget_bytes": subject.budget_bytes(SHARE),
        "changed": changes(before, footprint(model)),
        "prepared_s": time.perf_counter() - began_s,
    } | fitted(subject, subject.budget_bytes(SHARE), time_limit_s=time_limit_s)


def fitted(subject: Subject, budget_bytes: int, *, time_limit_s: float) -> Row:
    """Train a copy of the model with `fit` and compare it with the plain training."""

    def set_up(training: Training) -> None:
        fit(
            training.model,
            budget=budget_bytes,
            optimizer=training.optimizer,
            time_limit_s=time_limit_s,
        )

    training = Training(copy.deepcopy(subject.model), copy.deepcopy(subject.batch), LOSS_INSIDE)
    style: Style = dataclasses.replace(PLAIN, set_up=set_up)
    try:
        shown, measured_bytes = trained(training, style, measure=True)
    except (TraceError, FitError) as error:
        return {"refused": str(error)}
    plans = plans_of(training.model)
    solution = plans[-1].solution
    assert solution.simulation is not None
    found = [
        f"step {index}: {difference}"
        for index, (one, other) in enumerate(zip(subject.expected, shown, strict=True))
        for difference in differences(one, other).values()
    ]
    return {
        "status": solution.status,
        "n_plans": len(plans),
        "took_s": sum(plan.took_s for plan in plans),
        "rewrites": list(solution.graph.meta.rewrites),
        "n_recomputed": solution.simulation.n_recomputed,
        "overhead": solution.overhead,
        "n_compared": sum(map(len, subject.expected)),
        "differences": found[:5],
        "predicted_peak_bytes": solution.simulation.peak_bytes,
        "measured_peak_bytes": measured_bytes,
    }


def faults(row: Row) -> list[str]:
    """What is wrong with a row, in words; none: it keeps every promise."""
    if "failed" in row:
        return [str(row["failed"])]
    found = [f"tracing has changed {name}" for name in row.get("changed", ())]
    if "refused" in row:
        return found
    found += row["differences"]
    measured, predicted = row["measured_peak_bytes"], row["predicted_peak_bytes"]
    if measured > row["budget_bytes"]:
        found.append(f"peak {measured} bytes above the budget of {row['budget_bytes']}")
    if abs(measured - predicted) > CLOSE_SHARE * predicted:
        found.append(f"peak {measured} bytes, predicted {predicted}")
    return found


def outcome(row: Row) -> str:
    """How a row ends, in a word or two."""
    if "failed" in row:
        return "failed"
    if "refused" in row:
        return "refused"
    return f"planned, {counted(len(row['opaque']), 'piece')}" if row["opaque"] else "planned"


def rows_of(name: str, *, time_limit_s: float) -> Iterator[Row]:
    """The rows of a family, one for each of its batches."""
    family = FAMILIES[name]
    for batch_name in family.batches:
        row: Row = {"family": name, "class": family.kind, "batch": batch_name}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row |= run(family, batch_name, time_limit_s=time_limit_s)
        except Exception as error:  # noqa: BLE001: a fault of ours; the others still run
            row |= {"failed": f"{type(error).__name__}: {error}"}
        yield row


def main() -> None:
    parser = harness.parser("families", __doc__, time_limit_s=10.0)
    parser.add_argument("--families", type=harness.names(FAMILIES, ";"), default=list(FAMILIES))
    arguments = parser.parse_args()
    report = harness.read(arguments.out, "families")
    report["circumstances"] = harness.circumstances(arguments.time_limit)
    report["circumstances"]["versions"]["transformers"] = metadata.version("transformers")
    failed = False
    for name in arguments.families:
        rows = []
        for row in rows_of(name, time_limit_s=arguments.time_limit):
            rows.append(row)
            print(line(row), file=sys.stderr, flush=True)
            failed = failed or bool(faults(row))
        report["families"][name] = rows
        harness.write(arguments.out, report, markdown)
    sys.exit(failed)


def line(row: Row) -> str:
    """One row for the terminal."""
    head = f"{row['family']}, {row['batch'] or 'one batch'}: {outcome(row)}"
    if "refused" in row:
        head += f": {row['refused']}"
    elif "failed" not in row:
        head += (
            f" ({row['prepared_s']:.0f} + {row['took_s']:.0f} s), {row['n_recomputed']} recomputed"
        )
    return f"{head}; {'; '.join(faults(row)) or 'no fault'}"


_SUMMARY = (
    "{n_families} families, {n_rows} batches: {outcomes}; {n_wrong} with a fault. {n_compared} "
    "tensors were compared bitwise: after each of three optimizer steps loss, gradients, "
    "parameters, buffers and random state equal those of plain training. The budget is half of the "
    "activation range: in the middle between the least budget found and the peak of the plain step."
)
_COLUMNS = (
    *("family", "batch", "ops", "plain MB", "budget MB", "measured MB", "recomputed", "overhead %"),
    "outcome",
)


def markdown(report: Row) -> str:
    rows = [row for rows in report["families"].values() for row in rows]
    outcomes = collections.Counter(outcome(row).partition(",")[0] for row in rows)
    with_pieces = sum(bool(row.get("opaque")) and "refused" not in row for row in rows)
    listed = ", ".join(f"{n} {what}" for what, n in outcomes.items())
    parts = [
        "# Families of transformers",
        harness.ran(report),
        _SUMMARY.format(
            n_families=len(report["families"]),
            n_rows=len(rows),
            outcomes=f"{listed} ({with_pieces} of the planned with parts as single pieces)",
            n_wrong=sum(bool(faults(row)) for row in rows),
            n_compared=sum(row.get("n_compared", 0) for row in rows),
        ),
        harness.table(_COLUMNS, map(_cells, rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[object]:
    about = [row["family"], row["batch"]]
    wrong = "; ".join(faults(row))
    if "measured_peak_bytes" not in row:
        words = [outcome(row), row.get("refused", ""), wrong]
        return [*about, *[""] * 6, ": ".join(" ".join(word.split()) for word in words if word)]
    keys = ("plain_peak_bytes", "budget_bytes", "measured_peak_bytes")
    mb = [f"{row[key] / 1e6:.2f}" for key in keys]
    changed = [row["n_recomputed"], harness.percent(row["overhead"])]
    reasons = dict.fromkeys(str(piece["why"]) for piece in row["opaque"])
    ended = ": ".join([outcome(row), "; ".join(reasons)] if reasons else [outcome(row)])
    return [*about, row["n_nodes"], *mb, *changed, f"{ended}; **{wrong}**" if wrong else ended]


if __name__ == "__main__":
    main()
