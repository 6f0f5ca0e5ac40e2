"""Write the report as an HTML page: a single file that needs no network.

Text from outside (names of files, ops, modules) is escaped in `_text`. The plots are inline SVG
whose colours are CSS variables of the page, so they follow light and dark mode. Each plot is drawn
twice, for wide screens and for phones. On a phone the cells of wide tables are stacked, so that
nothing is cut off.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from graphs.files import write_whole
from solver.plan_analysis import ABOUT, block_rows, copies
from solver.reporting import copy_rows, memory_rows, rows, size_rows, verification_rows
from solver.reporting.report_data import Report
from solver.reporting.rows import headline, step_name
from solver.schedule import Solution
from solver.sizes_deadlines_progress import (
    format_both,
    format_percent,
    format_share,
    format_size,
    format_time,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_page(report: Report, path: Path, *, command: str) -> None:
    """Write the page atomically. Imports Matplotlib.

    command: the command that made the report, shown at its end.
    """
    write_whole(path, page(report, command=command).encode())


def page(report: Report, *, command: str) -> str:
    """The page as HTML text."""
    template = Template(files("solver.reporting").joinpath("page_template.html").read_text("utf-8"))
    answer = report.best
    return template.substitute(
        title=_text(f"{step_name(answer.plain)}: {headline(answer)}"),
        problem=_text(report.problem),
        headline=_prose(headline(answer)),
        device=_text(report.device),
        sections="\n".join(_sections(report, command)),
    )


def _sections(report: Report, command: str) -> Iterator[str]:
    """The sections of the page as HTML, in order."""
    from solver.reporting.plot import before_and_after, pareto, throughput

    answer = report.best
    yield _section("Answer", _status(answer.status))
    yield _list([*rows.answer_rows(report), *rows.request_rows(report)])

    def memory(width_in: float) -> Axes:
        return before_and_after(answer, width_in=width_in)[0]

    yield _section("Memory over the step", _figure(memory, "memory", "Memory over the step"))
    if (found_copies := copies(answer)) is not None:
        yield _section(
            copy_rows.copies_title(answer),
            _table(copy_rows.stream_table(found_copies)),
            _list(copy_rows.stall_rows(found_copies)),
            _table(copy_rows.trip_table(found_copies)),
        )
    by_dtype = memory_rows.dtype_table(answer)
    yield _section(
        "Memory at the peak",
        _table(memory_rows.memory_table(answer)),
        _list(memory_rows.peak_rows(answer)),
        *(() if by_dtype is None else (_paragraphs("Activations by dtype:"), _table(by_dtype))),
    )
    if (curve := report.curve) is not None:

        def budgets(width_in: float) -> Axes:
            return pareto(curve, chosen=answer, width_in=width_in)

        title = "Overhead against budget"
        yield _section(title, _figure(budgets, "budgets", title))
    if answer.schedule is not None:
        yield _section("Blocks", _paragraphs(BLOCK_TEXT), _table(_block_table(answer)))
    if (sizes := report.sizes) is not None:

        def rates(width_in: float) -> Axes:
            return throughput(sizes, width_in=width_in)

        yield _section(
            size_rows.SIZE_TITLES[sizes.size],
            _figure(rates, "sizes", "Throughput against size"),
            _table(size_rows.size_table(sizes)),
            _list(size_rows.size_rows(sizes)),
        )
    if len(report.solutions) + len(report.refused) > 1:
        yield _section("Methods", _table(rows.method_table(report)))
    if report.emitted is not None:
        setting = _list(rows.emitted_rows(report, report.emitted))
        yield _section(f"Setting for {report.emitted.title}", setting)
    yield _section("Lower bound", _paragraphs(*bound_text(answer)))
    if report.advice:
        yield _section("Advice", _list((ABOUT[a.kind], a.text) for a in report.advice))
    if report.verify_error:
        yield _section("Verification", _status("FAILED", f": {report.verify_error}"))
    found = report.verification
    if found is not None:
        yield _section(
            "Verification",
            _status("passed" if found.headline == "passed" else "FAILED", text=found.headline),
            _table(verification_rows.verification_table(found)),
            _list(verification_rows.verification_rows(found, reader=report.reader)),
        )
    notes = [f"Refused by {method}: {reason}" for method, reason in report.refused]
    notes += report.notes
    if notes:
        yield _section("Notes", _paragraphs(*notes))
    yield _section("Command", f'<div class="box"><pre>{_text(command)}</pre></div>')


BLOCK_TEXT = (
    "The model is split where few activations cross. Saved: what the forward ops of the block "
    "produce and is live when the backward pass starts. Dropped: what the baseline would save in "
    "addition."
)


def bound_text(solution: Solution) -> tuple[str, ...]:
    """Paragraphs on the lower bound: what it says, how far away the plan is, how it is proven."""
    budget = format_both(solution.request.budget_bytes)
    if math.isinf(solution.lower_bound_s):
        statement = (
            f"It is proven that no schedule fits {budget}: at some position the tensors that must "
            "be live are larger than that."
        )
        return (statement,)
    result = ""
    if solution.simulation is not None and solution.gap is not None:
        lost_s = max(0.0, solution.simulation.time_s - solution.lower_bound_s)
        result = (
            f" This plan takes {format_time(solution.simulation.time_s)} "
            f"({format_share(solution.overhead)}): no other plan can save more than "
            f"{format_time(lost_s)} per step, {format_percent(solution.gap)} of the baseline."
        )
    statement = (
        f"No schedule that fits {budget} takes less than {format_time(solution.lower_bound_s)} per "
        f"step, {format_share(solution.lower_bound_overhead)} relative to the baseline of "
        f"{format_time(solution.baseline.time_s)}.{result}"
    )
    proof = (
        "Proof: consider a position in the backward pass. What later ops read is either live there "
        "or must be recomputed afterwards. The cheapest choice within the budget at that position "
        "is an integer program. Its bound holds for every schedule that keeps the framework's "
        "order of first computations and computes backward ops once. The figure is that of the "
        "strongest position, or of several positions together."
    )
    return statement, proof


def _block_table(solution: Solution) -> rows.Table:
    """One row for each block of the model (`block_rows`)."""
    heads = (
        *("block", "module", "ops", "saved", "dropped"),
        *("recomputed ops", "recompute time", "forward time"),
    )
    blocks = block_rows(solution)
    # ops called by the model itself, such as its loss, are in no submodule: name the model
    whole = solution.graph.meta.model if any(row.module for row in blocks) else ""
    cells = (
        (
            str(row.block),
            row.module or whole or "",
            str(row.n_ops),
            *map(format_size, (row.kept_bytes, row.dropped_bytes)),
            str(row.n_recomputed),
            *map(format_time, (row.recompute_s, row.forward_s)),
        )
        for row in blocks
    )
    return rows.Table(heads, tuple(cells), n_text=2)


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<h2>{_text(title)}</h2>", *parts])


def _status(status: str, reason: str = "", *, text: str = "") -> str:
    """A line with the status in its colour. text: shown instead of the status."""
    return f'<p class="{status}">{_text((text or status) + reason)}</p>'


def _figure(draw: Callable[[float], Axes], name: str, label: str) -> str:
    """A plot in two widths, for pages and for phones; the style sheet shows one of them.

    draw: draws the plot into a new figure of the given width in inches.
    """
    from solver.reporting.plot import NARROW_IN, WIDE_IN, inline_svg

    def box(width_in: float, kind: str) -> str:
        svg = inline_svg(draw(width_in), name=f"{name}-{kind}")
        labelled = svg.replace("<svg", f'<svg role="img" aria-label="{_text(label)}"', 1)
        return f'<div class="box figure {kind}">{labelled}</div>'

    return box(WIDE_IN, "wide") + box(NARROW_IN, "narrow")


def _list(named: Iterable[tuple[str, str]]) -> str:
    items = (f"<dt>{_text(name)}</dt><dd>{_prose(value)}</dd>" for name, value in named)
    return "<dl>\n" + "\n".join(items) + "\n</dl>"


def _paragraphs(*texts: str) -> str:
    return "\n".join(f"<p>{_prose(text)}</p>" for text in texts)


def _table(shown: rows.Table) -> str:
    """A table. With more than MOST_COLUMNS columns, the cells of a row are stacked on a phone, each
    next to its column's head."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{'' if column < shown.n_text else NUMBER}{_head(tag, shown, column)}>"
            f"{_text(value)}</{tag}>"
            for column, value in enumerate(values)
        )

    body = "\n".join(
        f"<tr{BOLD if index == shown.bold else ''}>{cells('td', row)}</tr>"
        for index, row in enumerate(shown.rows)
    )
    stacked = STACKED if len(shown.heads) > MOST_COLUMNS else ""
    return (
        f'<div class="box"><table{stacked}>\n<thead><tr>{cells("th", shown.heads)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _head(tag: str, shown: rows.Table, column: int) -> str:
    """The attribute with the column's head for a cell of a table that may be stacked, else ""."""
    if tag != "td" or len(shown.heads) <= MOST_COLUMNS:
        return ""
    return f' data-head="{_text(shown.heads[column])}"'


def _prose(text: str) -> str:
    """As `_text`, with no line break between a number and its unit."""
    return _UNIT.sub("\u00a0", _text(text))


_UNIT = re.compile(r"(?<=[0-9]) (?=(?:[kKMGT]i?)?B\b|%|[mu]?s\b)")
MOST_COLUMNS = 5
"""How many columns fit side by side on a phone."""
STACKED = ' class="stacked"'
NUMBER = ' class="number"'
BOLD = ' class="bold"'


def _text(text: str) -> str:
    """Escape text for HTML; characters that cannot be encoded become "?"."""
    return escape(text.encode("utf-8", "replace").decode())
