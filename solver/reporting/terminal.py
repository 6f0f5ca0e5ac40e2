"""The report as a person reads it: what was asked, where the memory goes, the answer, its proof.

The words are those of `solver.reporting.wording`. Long values fold; none is cut off. Colour is
Rich's
business: it honours NO_COLOR and drops colour where stdout is no terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from solver.analysis import ABOUT, SizeSearch
from solver.common import format_size, format_time
from solver.reporting.rows import Report
from solver.reporting.wording import (
    SIZE_TITLES,
    answered,
    asked,
    compared,
    emitted,
    measured_peaks,
    measured_times,
    memory_parts,
    part,
    peaks,
    size_heads,
    size_row,
    size_words,
    verified,
)
from solver.runtime_hooks import Verification
from solver.schedule import CATEGORIES, STATUSES, Solution

STYLE_OF_STATUS = {"optimal": "bold green", "feasible": "bold cyan", "time_limit": "bold yellow"}


def show(report: Report, console: Console) -> None:
    """Print the report for a person."""
    written(Group(*_sections(report, console)), console)


def written(shown: RenderableType, console: Console) -> None:
    """Print it without blanks at the ends of lines."""
    with console.capture() as printed:
        console.print(shown)
    text = "\n".join(line.rstrip() for line in printed.get().splitlines())
    console.file.write(text.lstrip("\n") + "\n")


def _sections(report: Report, console: Console) -> Iterator[RenderableType]:
    answer = report.best
    yield heading("Problem", report.problem)
    yield pairs(asked(report))
    yield heading("Memory at the peak of the step")
    yield _memory(answer)
    yield pairs(peaks(answer))
    if report.sizes is not None:
        yield heading(SIZE_TITLES[report.sizes.size])
        yield _sizes(report.sizes)
        yield pairs(size_words(report.sizes))
    if len(report.solutions) + len(report.refused) > 1:
        yield heading("Methods")
        table = _comparison(report, n_spaces=2)
        unbounded = console.options.update(max_width=1000)
        if console.measure(table, options=unbounded).maximum > console.width:
            table = _comparison(report, n_spaces=1)
        yield table
    yield heading("Answer", answer.status, STYLE_OF_STATUS.get(answer.status, "bold red"))
    yield pairs(answered(report))
    if report.emitted is not None:
        yield heading("Setting", f"for {report.emitted.title}")
        yield pairs(emitted(report, report.emitted))
    if report.verification is not None:
        passed = report.verification.passed
        style = "bold green" if passed else "bold red"
        yield heading("Verified", "passed" if passed else "FAILED", style)
        yield _measured(report.verification)
        yield pairs(verified(report.verification))
    if report.verify_error:
        yield heading("Verified", "FAILED", "bold red")
        yield pairs([("reason", report.verify_error)])
    if report.advice:
        yield heading("Advice")
        yield pairs((ABOUT[advice.kind], advice.text) for advice in report.advice)
    for method, reason in report.refused:
        yield Text(f"\nRefused by {method}: {reason}")
    for note in report.notes:
        yield Text(f"\nNote: {note}")


def heading(title: str, value: str = "", style: str = "") -> RenderableType:
    """The first line of a section."""
    text = Text.assemble("\n", (title, "bold"), ("  " if value else ""), (value, style))
    return Padding(text, 0)


def pairs(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Name and value side by side; a long value folds under itself and loses nothing."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=15, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return Padding(table, (0, 0, 0, 2))


def _memory(solution: Solution) -> RenderableType:
    before, after = memory_parts(solution)
    columns = [before] if after is None else [before, after]
    heads = ["without plan", "", "with plan", ""][: 2 * len(columns)]
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=15, no_wrap=True)
    for _ in heads:
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(Text(head, style="dim") for head in heads))
    for name in CATEGORIES:
        table.add_row(name, *(cell for parts in columns for cell in part(name, parts)))
    totals = [cell for parts in columns for cell in (format_size(sum(parts.values())), "")]
    table.add_row(*(Text(cell, style="bold") for cell in ("peak", *totals)))
    return Padding(table, (0, 0, 0, 2))


def _comparison(report: Report, *, n_spaces: int) -> RenderableType:
    table = Table(box=None, padding=(0, n_spaces, 0, 0), header_style="dim", pad_edge=False)
    # Names stay whole; on a narrow terminal the figures fold, at first between number and unit.
    methods = [s.method for s in report.solutions] + [method for method, _ in report.refused]
    table.add_column("method", no_wrap=True, min_width=max(map(len, methods)))
    table.add_column("status", no_wrap=True, min_width=max(map(len, STATUSES)))
    for title in ("peak", "overhead", "bound", "gap", "again", "planned in"):
        table.add_column(title, justify="right", overflow="fold")
    chosen = report.best
    for solution in report.solutions:
        style = "bold" if solution is chosen and solution.simulation is not None else ""
        table.add_row(*compared(solution), style=style)
    for method, _ in report.refused:
        table.add_row(method, "refused")
    return Padding(table, (0, 0, 0, 2))


def _sizes(search: SizeSearch) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for index, title in enumerate(size_heads(search)):
        table.add_column(title, justify="left" if index == 1 else "right", no_wrap=True)
    for candidate in search.candidates:
        style = "bold" if candidate is search.largest else ""
        table.add_row(*size_row(candidate), style=style)
    return Padding(table, (0, 0, 0, 2))


def _measured(found: Verification) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=15, no_wrap=True)
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    heads = ("", "predicted", "measured", "predicted", "measured")
    table.add_row("", Text("plan", style="dim"), "", Text("without", style="dim"), "")
    table.add_row(*(Text(head, style="dim") for head in heads))
    table.add_row("peak", *map(format_size, measured_peaks(found)))
    table.add_row("time of a step", *map(format_time, measured_times(found)))
    return Padding(table, (0, 0, 0, 2))
