"""Families of the transformers or timm library through `fit`: the same bits, within the budget.

    python -m benchmarks.families --out benchmarks/results/families.json
        [--families "gpt2;t5"] [--n-batches 1] [--time-limit S]
    python -m benchmarks.families --library timm --out benchmarks/results/families_timm.json

Each family of transformers is trained as `test_training` of its own tests trains it: a tiny model
built from its configuration class, in training mode, called with ids, masks (ones, and rows of
different lengths), labels or pixels. `config.use_cache` is off, as the library's Trainer sets it.
A family of timm is one of its modules, with a small registered model that is called with images;
the cross-entropy of its logits is outside of the model. The budget is half of the activation range:
in the middle between what is resident for the whole step and the peak of the plain step; where
nothing fits that, between the least budget found and the peak.

Three optimizer steps are compared with plain training: loss, every gradient, every parameter and
buffer, and the random state, all bitwise; torch's, Python's and NumPy's generators start alike at
each step. The memory of the last step is measured. A row ends in one of three ways: planned,
planned with parts as single pieces, or refused with the message that a user reads. Figures are
written after each family, so that a run that was stopped can be continued.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import random
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.matrix import changes, footprint, peak_faults
from benchmarks.same_bits import RATE, between, trained
from benchmarks.step_styles import STYLES, Seen, Training
from benchmarks.zoo import Entry
from benchmarks.zoo.families import FAMILIES, Family
from benchmarks.zoo.timm_models import MODELS, ImageModel
from graphs.trace import TraceError, trace
from scheduler_runtime import FitError, fit, plans_of
from solver.methods import find_obstacle
from solver.schedule import baseline, simulate
from solver.sizes_deadlines_progress import counted

LIBRARIES: Mapping[str, Mapping[str, Family | ImageModel]] = {
    "transformers": FAMILIES,
    "timm": MODELS,
}


def _seeded(training: Training) -> None:
    """A step; some models draw from NumPy's and Python's generators."""
    random.seed(0)
    numpy.random.seed(0)
    STYLES["plain"].step(training)


PLAIN = dataclasses.replace(STYLES["plain"], step=_seeded)


def run(family: Family | ImageModel, batch_name: str, *, time_limit_s: float) -> Row:
    """One batch of a family: how it ends, and what was measured."""
    model, batch = family.made(batch_name)
    training = functools.partial(_training, model, batch, family.entry)
    expected, _ = trained(training(), PLAIN)
    before = footprint(model)
    began_s = time.perf_counter()
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        graph = trace(model, batch, optimizer=optimizer, **family.entry.options)
    except TraceError as error:
        return {"refused": _said(error), "changed": changes(before, footprint(model))}
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    budget_bytes = (graph.resident_bytes + peak_bytes) // 2
    row: Row = {
        "n_nodes": len(graph.nodes),
        "opaque": [
            {**part, "why": harness.without_folders(str(part["why"]))}
            for part in graph.meta.opaque_parts
        ],
        "resident_bytes": graph.resident_bytes,
        "plain_peak_bytes": peak_bytes,
        "budget_bytes": budget_bytes,
        "changed": changes(before, footprint(model)),
        "traced_s": time.perf_counter() - began_s,
    }
    options = {"budget": budget_bytes, "time_limit_s": time_limit_s}
    try:
        return row | fitted(training(), expected, options)
    except FitError:  # nothing fits half; so between the least budget and the plain peak
        least_bytes = find_obstacle(graph).reached_bytes
    options["budget"] = (least_bytes + peak_bytes) // 2
    row |= {"least_bytes": least_bytes, "budget_bytes": options["budget"]}
    return row | fitted(training(), expected, options)


def _training(model: nn.Module, batch: Any, entry: Entry) -> Training:
    return Training(copy.deepcopy(model), copy.deepcopy(batch), entry)


def fitted(training: Training, expected: list[Seen], options: Mapping[str, Any]) -> Row:
    """Train with `fit` and compare with a plain training, which has shown what is expected."""

    def set_up(training: Training) -> None:
        fit(training.model, optimizer=training.optimizer, **options)

    try:
        style = dataclasses.replace(PLAIN, set_up=set_up)
        shown, measured_bytes = trained(training, style, measure=True)
    except TraceError as error:
        return {"refused": _said(error)}
    plans = plans_of(training.model)
    solution = plans[-1].solution
    assert solution.simulation is not None
    return {
        "status": solution.status,
        "n_plans": len(plans),
        "took_s": sum(plan.took_s for plan in plans),
        "rewrites": list(solution.graph.meta.rewrites),
        "n_recomputed": solution.simulation.n_recomputed,
        "overhead": solution.overhead,
        "n_compared": sum(map(len, expected)),
        "differences": between(expected, shown)[:5],
        "predicted_peak_bytes": solution.simulation.peak_bytes,
        "measured_peak_bytes": measured_bytes,
    }


def _said(error: TraceError) -> str:
    """Its message, with paths of the library from where it is installed."""
    installed = Path(torch.__file__).parent.parent
    return str(error).replace(f"{installed}/", "")


def faults(row: Row) -> list[str]:
    """What is wrong with a row, in words; none: it keeps every promise."""
    if "failed" in row:
        return [str(row["failed"])]
    found = [f"tracing has changed {name}" for name in row.get("changed", ())]
    if "refused" in row:
        return found
    return [*found, *row["differences"], *peak_faults(row)]


def outcome(row: Row) -> str:
    """How a row ends, in a word or two."""
    if "failed" in row:
        return "failed"
    if "refused" in row:
        return "refused"
    words = f"planned, {counted(len(row['opaque']), 'piece')}" if row["opaque"] else "planned"
    return f"{words}, half does not fit" if "least_bytes" in row else words


def rows_of(library: str, name: str, *, n_batches: int, time_limit_s: float) -> Iterator[Row]:
    """The rows of a family, one for each of its last n batches."""
    family = LIBRARIES[library][name]
    for batch_name in list(family.batches)[-n_batches:]:
        row: Row = {"family": name, "class": family.kind, "batch": batch_name}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row |= run(family, batch_name, time_limit_s=time_limit_s)
        except Exception as error:  # noqa: BLE001 (a row of its own: the others still run)
            row |= {"failed": f"{type(error).__name__}: {error}"}
        yield row


def main() -> None:
    parser = harness.parser("families", __doc__, time_limit_s=60.0)
    parser.add_argument("--library", choices=LIBRARIES, default="transformers")
    parser.add_argument("--families", help="names of the library's families (all)")
    parser.add_argument("--n-batches", type=int, default=2, help="1: no masks of ones")
    arguments = parser.parse_args()
    library = arguments.library
    try:
        names = _chosen(library, arguments.families)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --families: {error}")
    options = {"n_batches": arguments.n_batches, "time_limit_s": arguments.time_limit}
    harness.run_each(
        arguments,
        "families",
        {name: functools.partial(rows_of, library, name, **options) for name in names},
        line=line,
        faults=faults,
        markdown=functools.partial(markdown, library=library),
        versions=[library],
    )


def _chosen(library: str, given: str | None) -> list[str]:
    """The families that are asked for; not given: all."""
    known = LIBRARIES[library]
    return list(known) if given is None else harness.names(known, ";")(given)


def line(row: Row) -> str:
    """One row for the terminal."""
    head = f"{row['family']}, {row['batch'] or 'one batch'}: {outcome(row)}"
    if "refused" in row:
        head += f": {row['refused']}"
    elif "failed" not in row:
        head += (
            f" ({row['traced_s']:.0f} + {row['took_s']:.0f} s), {row['n_recomputed']} recomputed"
        )
    return f"{head}; {'; '.join(faults(row)) or 'no fault'}"


_SUMMARY = (
    "{n_families} of {n_known} families, {n_rows} batches: {outcomes}; {n_wrong} with a fault. "
    "{n_compared} tensors were compared bitwise: after each of three optimizer steps loss, "
    "gradients, parameters, buffers and random state equal those of plain training. The budget is "
    "half of the activation range: in the middle between what is resident and the peak of the "
    "plain step; where nothing fits that (half does not fit), between the least budget found and "
    "the peak."
)
_COLUMNS = (
    *(
        "family",
        "model",
        "batch",
        "ops",
        "plain MB",
        "budget MB",
        "measured MB",
        "recomputed",
        "overhead %",
    ),
    "outcome",
)


def markdown(report: Row, *, library: str = "transformers") -> str:
    rows = [row for rows in report["families"].values() for row in rows]
    outcomes = collections.Counter(outcome(row).partition(",")[0] for row in rows)
    with_pieces = sum(bool(row.get("opaque")) and "refused" not in row for row in rows)
    listed = ", ".join(f"{n} {what}" for what, n in outcomes.items())
    parts = [
        f"# Families of {library}",
        harness.ran(report),
        _SUMMARY.format(
            n_families=len(report["families"]),
            n_known=len(LIBRARIES[library]),
            n_rows=len(rows),
            outcomes=f"{listed} ({with_pieces} of the planned with parts as single pieces)",
            n_wrong=sum(bool(faults(row)) for row in rows),
            n_compared=sum(row.get("n_compared", 0) for row in rows),
        ),
        harness.table(_COLUMNS, map(_cells, rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(row: Row) -> list[object]:
    about = [row["family"], row["class"], row["batch"]]
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
