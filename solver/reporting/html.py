"""The report as one HTML page: figures, pictures and proof in a file that needs no network.

Every word from outside (names of files, ops, modules) is escaped here, in `_text`; the pictures are
inline SVG whose colours are the page's CSS variables, so they follow light and dark. Tables scroll
inside their own boxes: the page is never wider than a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from graphs.files import write_whole
from solver.analysis import ABOUT, Curve, SizeSearch, block_rows
from solver.common import format_both, format_share, format_size, format_time
from solver.reporting import wording
from solver.reporting.rows import Report
from solver.schedule import CATEGORIES, Solution


def write_page(report: Report, path: Path, *, command: str, curve: Curve | None = None) -> None:
    """Write the page, whole or not at all. Imports Matplotlib. command: the one that made it."""
    write_whole(path, page(report, command=command, curve=curve).encode())


def page(report: Report, *, command: str, curve: Curve | None = None) -> str:
    """The HTML text. curve: overhead against budget, where it has been computed."""
    template = Template(files("solver.reporting").joinpath("page_template.html").read_text("utf-8"))
    return template.substitute(
        title=_text(report.problem), sections="\n".join(_sections(report, command, curve))
    )


def _sections(report: Report, command: str, curve: Curve | None) -> Iterator[str]:
    from solver.reporting.plot import before_and_after, inline_svg, pareto, throughput

    answer = report.best
    yield _section("Answer", f'<p class="{answer.status}">{_text(answer.status)}</p>')
    yield _list([*wording.answered(report), *wording.asked(report)])
    picture = inline_svg(before_and_after(answer)[0], name="memory")
    yield _section("Memory over the step", _figure(picture, "Memory over one training step"))
    yield _section("Memory at the peak", _breakdown(answer) + _list(wording.peaks(answer)))
    if curve is not None:
        picture = inline_svg(pareto(curve, chosen=answer), name="budgets")
        yield _section("What a smaller budget costs", _figure(picture, "Overhead against budget"))
    rows = block_rows(answer)
    if rows:
        yield _section("Blocks", _paragraphs(BLOCK_WORDS), _blocks(answer))
    if report.sizes is not None:
        picture = inline_svg(throughput(report.sizes), name="sizes")
        yield _section(
            wording.SIZE_TITLES[report.sizes.size],
            _figure(picture, "Throughput against size"),
            _sizes(report.sizes),
            _list(wording.size_words(report.sizes)),
        )
    if len(report.solutions) + len(report.refused) > 1:
        yield _section("Methods", _methods(report))
    if report.emitted is not None:
        setting = _list(wording.emitted(report, report.emitted))
        yield _section(f"Setting for {report.emitted.title}", setting)
    yield _section("What the bound says", _paragraphs(*bound_words(answer)))
    if report.advice:
        yield _section("Advice", _list((ABOUT[a.kind], a.text) for a in report.advice))
    yield from _verified(report)
    notes = [f"Refused by {method}: {reason}" for method, reason in report.refused]
    notes += report.notes
    if notes:
        yield _section("Notes", _paragraphs(*notes))
    yield _section("Made by", f'<div class="box"><pre>{_text(command)}</pre></div>')


BLOCK_WORDS: str = (
    "The model cut where it is narrow. Kept: what the block's forward ops made and the device "
    "holds when the backward pass starts; dropped: what it would hold besides without a plan."
)


def bound_words(solution: Solution) -> tuple[str, ...]:
    """The lower bound in whole sentences: what it says, how far the plan is from it, and why."""
    budget = format_both(solution.request.budget_bytes)
    if math.isinf(solution.lower_bound_s):
        words = (
            f"No schedule whatever fits {budget}: that is proven, not only not found. At some "
            "moment what must be on the device is more than that."
        )
        return (words,)
    found = ""
    if solution.simulation is not None and solution.gap is not None:
        lost_s = max(0.0, solution.simulation.time_s - solution.lower_bound_s)
        found = (
            f" This plan takes {format_time(solution.simulation.time_s)} "
            f"({format_share(solution.overhead)}), so whatever else is tried, at most "
            f"{format_time(lost_s)} of a step, {100 * solution.gap:.2f} %, can still be won."
        )
    says = (
        f"No schedule that fits {budget} takes less than {format_time(solution.lower_bound_s)} a "
        f"step, {format_share(solution.lower_bound_overhead)} on top of the "
        f"{format_time(solution.baseline.time_s)} without checkpointing.{found}"
    )
    why = (
        "Why: stop the step at a moment of the backward pass. What later ops need is on the device "
        "by then or must be made again after it. The cheapest choice that fits the budget at that "
        "moment is an integer program; the bound it proves holds for every schedule that computes "
        "in the framework's order of first runs and runs backward ops once. The strongest of these "
        "moments, or several at once, gives the figure."
    )
    return says, why


def _breakdown(solution: Solution) -> str:
    before, after = wording.memory_parts(solution)
    columns = [before] if after is None else [before, after]
    heads = ["", "without plan", "", "with plan", ""][: 1 + 2 * len(columns)]
    rows = [
        [name, *(cell for parts in columns for cell in wording.part(name, parts))]
        for name in CATEGORIES
    ]
    totals = [cell for parts in columns for cell in (format_size(sum(parts.values())), "")]
    return _table(heads, [*rows, ["peak", *totals]], n_words=1, marked={len(rows): "total"})


def _blocks(solution: Solution) -> str:
    heads = ["block", "module", "ops", "kept", "dropped", "ops again", "time again", "forward"]
    rows = [
        [
            str(row.block),
            row.module,
            str(row.n_ops),
            format_size(row.kept_bytes),
            format_size(row.dropped_bytes),
            str(row.n_recomputed),
            format_time(row.again_s),
            format_time(row.forward_s),
        ]
        for row in block_rows(solution)
    ]
    return _table(heads, rows, n_words=2)


def _sizes(search: SizeSearch) -> str:
    rows = [wording.size_row(candidate) for candidate in search.candidates]
    chosen = [i for i, candidate in enumerate(search.candidates) if candidate is search.largest]
    return _table(
        wording.size_heads(search), rows, n_words=2, marked=dict.fromkeys(chosen, "chosen")
    )


def _methods(report: Report) -> str:
    heads = ["method", "status", "peak", "overhead", "bound", "gap", "ops again", "planned in"]
    rows = [list(wording.compared(solution)) for solution in report.solutions]
    rows += [[method, "refused", *[""] * 6] for method, _ in report.refused]
    chosen = report.solutions.index(report.best)
    return _table(heads, rows, n_words=2, marked={chosen: "chosen"})


def _verified(report: Report) -> Iterator[str]:
    if report.verify_error:
        words = f'<p class="FAILED">FAILED: {_text(report.verify_error)}</p>'
        yield _section("Verified", words)
    found = report.verification
    if found is None:
        return
    rows = [
        ["peak", *map(format_size, wording.measured_peaks(found))],
        ["time of a step", *map(format_time, wording.measured_times(found))],
    ]
    heads = ["", "plan, predicted", "measured", "without, predicted", "measured"]
    status = "passed" if found.passed else "FAILED"
    yield _section(
        "Verified",
        f'<p class="{status}">{status}</p>',
        _table(heads, rows, n_words=1),
        _list(wording.verified(found)),
    )


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<h2>{_text(title)}</h2>", *parts])


def _figure(svg: str, words: str) -> str:
    drawn = svg.replace("<svg", f'<svg role="img" aria-label="{_text(words)}"', 1)
    return f'<div class="box figure">{drawn}</div>'


def _list(rows: Iterable[tuple[str, str]]) -> str:
    items = (f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in rows)
    return "<dl>\n" + "\n".join(items) + "\n</dl>"


def _paragraphs(*texts: str) -> str:
    return "\n".join(f"<p>{_text(text)}</p>" for text in texts)


def _table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    n_words: int,
    marked: dict[int, str] | None = None,
) -> str:
    """A table in a box of its own; all but the first n_words columns are figures. marked: the CSS
    class of a row, by its index."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{'' if column < n_words else NUMBER}>{_text(value)}</{tag}>"
            for column, value in enumerate(values)
        )

    lines = []
    for index, row in enumerate(rows):
        name = (marked or {}).get(index)
        lines.append(f"<tr{f' class={name!r}' if name else ''}>{cells('td', row)}</tr>")
    body = "\n".join(lines)
    return (
        f'<div class="box"><table>\n<thead><tr>{cells("th", heads)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


NUMBER = ' class="number"'


def _text(text: str) -> str:
    """Anything from outside as HTML text or attribute; what no page may hold is shown as ?."""
    return escape(text.encode("utf-8", "replace").decode())
