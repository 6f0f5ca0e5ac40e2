"""Print the report on a terminal.

Long values are wrapped; nothing is truncated. Rich handles colours: it honours NO_COLOR, and uses
none if stdout is not a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from solver.plan_analysis import ABOUT, copies
from solver.reporting import copy_rows, memory_rows, rows, size_rows, verification_rows
from solver.reporting.report_data import Report

STYLE_OF_STATUS = {"optimal": "bold green", "feasible": "bold cyan", "time_limit": "bold yellow"}
FAILED = "bold red"
NAME_WIDTH = 18
NOTABLE_SHARE = 0.01
"""Activations are listed by dtype if a dtype other than the largest has at least this share."""


def show(report: Report, console: Console) -> None:
    """Print the report."""
    print_plain(Group(*_sections(report, console)), console)


def show_added(report: Report, shown: Report, console: Console) -> None:
    """Print what the report has in addition to an earlier one: verification, files, notes.

    shown: the report that has been printed.
    """
    sections: list[RenderableType] = []
    if (report.verification, report.verify_error) != (shown.verification, shown.verify_error):
        sections += _verification(report, console)
    if files := [(what, str(path)) for what, path in report.files[len(shown.files) :]]:
        sections += [heading("Files"), pairs(files)]
    sections += [_note(note) for note in report.notes[len(shown.notes) :]]
    if sections:
        console.file.write("\n")
        print_plain(Group(*sections), console)


def print_plain(shown: RenderableType, console: Console) -> None:
    """Print without trailing spaces and without leading empty lines."""
    with console.capture() as printed:
        console.print(shown)
    text = "\n".join(line.rstrip() for line in printed.get().splitlines())
    console.file.write(text.lstrip("\n") + "\n")
    console.file.flush()  # the next output may take minutes


def _sections(report: Report, console: Console) -> Iterator[RenderableType]:
    """The sections of the report, in order."""
    answer = report.best
    yield heading("Problem", report.problem)
    yield pairs(rows.request_rows(report))
    yield heading("Memory at the peak of the step")
    yield _table(memory_rows.memory_table(answer), console)
    yield pairs(memory_rows.peak_rows(answer))
    if (by_dtype := memory_rows.dtype_table(answer, least_share=NOTABLE_SHARE)) is not None:
        yield heading("Activations at the peak by dtype")
        yield _table(by_dtype, console)
    if report.sizes is not None:
        yield heading(size_rows.SIZE_TITLES[report.sizes.size])
        yield _table(size_rows.size_table(report.sizes), console)
        yield pairs(size_rows.size_rows(report.sizes))
    if len(report.solutions) + len(report.refused) > 1:
        yield heading("Methods")
        yield _table(rows.method_table(report), console)
    yield heading("Answer", answer.status, STYLE_OF_STATUS.get(answer.status, FAILED))
    yield pairs(rows.answer_rows(report))
    if (found_copies := copies(answer)) is not None:
        yield heading(copy_rows.copies_title(answer))
        yield _table(copy_rows.stream_table(found_copies), console)
        yield pairs(copy_rows.stall_rows(found_copies))
        yield pairs(copy_rows.timeline_rows(found_copies))
    if report.emitted is not None:
        yield heading("Setting", f"for {report.emitted.title}")
        yield pairs(rows.emitted_rows(report, report.emitted))
    yield from _verification(report, console)
    if report.advice:
        yield heading("Advice")
        yield pairs((ABOUT[advice.kind], advice.text) for advice in report.advice)
    for method, reason in report.refused:
        yield Text(f"\nRefused by {method}: {reason}")
    yield from map(_note, report.notes)


def _note(note: str) -> RenderableType:
    return Text(f"\nNote: {note}")


def _verification(report: Report, console: Console) -> Iterator[RenderableType]:
    """The section on the verification; empty if there was none."""
    found = report.verification
    if found is not None:
        style = "bold green" if found.headline == "passed" else FAILED
        yield heading("Verification", found.headline, style)
        yield _table(verification_rows.verification_table(found), console)
        yield pairs(verification_rows.verification_rows(found, reader=report.reader))
    if report.verify_error:
        yield heading("Verification", "FAILED", FAILED)
        yield pairs([("reason", report.verify_error)])


def heading(title: str, value: str = "", style: str = "") -> RenderableType:
    """The first line of a section."""
    text = Text.assemble("\n", (title, "bold"), ("  " if value else ""), (value, style))
    return Padding(text, 0)


def pairs(named: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and values side by side; a long value is wrapped in its column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=NAME_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in named:
        table.add_row(Text(name), Text(value))
    return Padding(table, (0, 0, 0, 2))


def _table(shown: rows.Table, console: Console) -> RenderableType:
    """Draw a table. Text columns are never wrapped. On a narrow terminal the spare columns are left
    out first; if that is not enough, numbers are wrapped before their unit.
    """

    def drawn(shown: rows.Table, n_spaces: int) -> Padding:
        table = Table(box=None, padding=(0, n_spaces, 0, 0), header_style="dim", pad_edge=False)
        for index, head in enumerate(shown.heads):
            if index < shown.n_text:
                width = NAME_WIDTH if shown.n_text == 1 else None
                longest = max([len(head), *(len(row[index]) for row in shown.rows)])
                table.add_column(head, no_wrap=True, min_width=width or longest)
            else:
                table.add_column(head, justify="right", overflow="fold")
        for index, row in enumerate(shown.rows):
            table.add_row(*map(Text, row), style="bold" if index == shown.bold else "")
        return Padding(table, (0, 0, 0, 2))

    unbounded = console.options.update(max_width=1000)
    for n_spaces in (2, 1):
        wide = drawn(shown, n_spaces)
        if console.measure(wide, options=unbounded).maximum <= console.width:
            return wide
    return _table(shown.without(shown.spare[0]), console) if shown.spare else wide
