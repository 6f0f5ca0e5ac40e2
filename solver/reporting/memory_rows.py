"""The memory at the peak as tables and rows: by category, by dtype, and the peak op."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from solver.reporting.rows import Row, Table
from solver.schedule import PeakMemory, Solution
from solver.sizes_deadlines_progress import describe_op, format_percent, format_size


def memory_table(solution: Solution) -> Table:
    """Bytes at the peak by category, for the baseline and for a plan that differs from it."""
    runs = solution.peaks
    by_run = {name: [run.bytes_of[name] for run in runs] for name in runs[0].bytes_of}
    table = _byte_table(runs, by_run, total="peak")
    if not solution.graph.meta.parameters:  # the graph does not record the module's tensors
        return table
    # Below the row of buffers, list those that are not the module's own: "  (random state)".
    graph = solution.graph
    own = {*graph.meta.buffers.values(), *graph.meta.device_bytes}
    inside = tuple(
        (f"  ({each.name.replace('_', ' ')})", *[format_size(each.size_bytes), ""] * len(runs))
        for each in graph.tensors
        if each.kind == "buffer" and each.name not in own
    )
    below = 1 + list(by_run).index("buffers")
    rows = (*table.rows[:below], *inside, *table.rows[below:])
    return dataclasses.replace(table, rows=rows, bold=len(rows) - 1)


def dtype_table(solution: Solution, *, least_share: float = 0.0) -> Table | None:
    """Bytes of activations at the same peaks by dtype; None if the graph does not record dtypes.

    least_share: also return None if, at every peak, all dtypes but the largest have less than this
        share of the activations.
    """
    runs = solution.peaks
    dtypes = sorted({name for run in runs for name in run.activations_of})
    seconds = (sorted(run.activations_of.values())[:-1] for run in runs)
    parts = zip(runs, seconds, strict=True)
    if not dtypes or all(
        (sizes[-1] if sizes else 0) < least_share * run.bytes_of["activations"]
        for run, sizes in parts
    ):
        return None
    by_run = {name: [run.activations_of.get(name, 0) for run in runs] for name in dtypes}
    return _byte_table(runs, by_run, total="activations")


def _byte_table(
    runs: Sequence[PeakMemory], bytes_of: Mapping[str, Sequence[int]], *, total: str
) -> Table:
    """One row for each name with its bytes and share at each peak, and a last row with the sums."""
    totals = [sum(sizes) for sizes in zip(*bytes_of.values(), strict=True)]
    rows = [
        (name, *(cell for pair in zip(sizes, totals, strict=True) for cell in part(*pair)))
        for name, sizes in bytes_of.items()
    ]
    last = (total, *(cell for n_bytes in totals for cell in (format_size(n_bytes), "")))
    heads = (head for run in runs for head in (run.name, ""))
    return Table(("", *heads), (*rows, last), bold=len(rows))


def part(size_bytes: int, total_bytes: int) -> tuple[str, str]:
    """A size and its share of the total, as text; the share of 0 bytes is ""."""
    share = size_bytes / (total_bytes or 1)
    return format_size(size_bytes), format_percent(share, digits=1) if size_bytes else ""


def peak_rows(solution: Solution) -> Iterator[Row]:
    """The peak ops of the baseline and of the plan."""
    for run in solution.peaks:
        yield f"peak op ({run.name})", describe_op(run.node)
