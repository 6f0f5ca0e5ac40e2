"""The report of `benchmarks.plan_quality` as Markdown: plans, missed targets, what became worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from benchmarks import harness
from benchmarks.harness import Row, percent, table

TARGET_GAP = 0.001
"""Target for the gap at budget shares of a half and more, as a share of the baseline's time."""
TIGHT_TARGET_GAP = 0.01
"""The same at smaller budget shares."""
WORSE_BY = 0.0002
"""By how much an overhead must have grown to count as worse, as a share of the baseline's time."""
SHOWN_GAP = 0.001
SHOWN_SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)
WAYS = ("none", "bitwise")
DASH = "\N{EN DASH}"
LEGEND = (
    "Overhead, bound and gap are in percent of the plain step without checkpointing; a → b: "
    "without rewrites and with those that keep all bits. Seconds are processor seconds of a search."
)
TITLES = {
    "gpt2": "GPT-2 small",
    "llama-32": "Llama 8B, 32 layers",
    "llama-80": "Llama 8B's width, 80 layers",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "unet": "U-Net",
    "densenet121": "DenseNet-121",
    "vit-base": "ViT-B/16",
    "vit-large": "ViT-L/16",
    "lstm-200": "LSTM cells, 200 steps",
    "lstm-2000": "recurrent, 2000 steps (synthetic)",
    "residual-1000": "1000 residual blocks (synthetic)",
}
"""The graphs in the table of the docs, with their titles there."""


def markdown(report: Row) -> str:
    """The page: the table of the docs, what misses targets, then a table for each graph."""
    graphs = report["graphs"]
    counts = Counter(way for _, _, way in _measured_cells(graphs))
    aim = "0.1 points at shares of a half and more, 1 point below"
    parts = [
        "# Quality of plans",
        harness.ran(report, cpus="one used"),
        LEGEND,
        summary(graphs),
        f"Above the target for the gap ({aim}):",
        *(_list_line(f"Rewrites {way}", _missed_gaps(graphs, way), counts[way]) for way in WAYS),
        _list_line("Worse with rewrites", _worse_with_rewrites(graphs), counts["bitwise"]),
        _list_line("Searches that the clock ended", _timed_out(graphs), counts.total()),
    ]
    for name, found in graphs.items():
        parts += _graph_section(name, found)
    return "\n\n".join(parts) + "\n"


def summary(graphs: Row) -> str:
    """The table of the docs: a row for each graph in TITLES."""
    shares = [f"{share:.0%}".replace("%", " %") for share in SHOWN_SHARES]
    others = ("every block", "√L", "`dp`", "PyTorch")
    head = ["", "ops", "least GB", *shares, "search", *others]
    rows = [_summary_row(title, graphs[name]) for name, title in TITLES.items() if name in graphs]
    return table(head, rows)


def _summary_row(title: str, found: Row) -> list[object]:
    rows = {row["share"]: row for row in found["rows"]}
    ways = [way for way in WAYS if way in found["least"]]
    shown = [share for share in SHOWN_SHARES if share in rows]
    plans = {
        s: " → ".join(_with_gap(rows[s][way]) for way in ways if way in rows[s]) for s in shown
    }
    least = (found["least"][way]["reached_bytes"] for way in ways)
    last = {share: [row[way] for way in ways if way in row][-1] for share, row in rows.items()}
    seconds = [last[share]["seconds"] for share in shown or rows]
    half = rows[0.5]["others"] if 0.5 in rows else {}  # a run may have only some shares
    torch = [half[name] for name in half if name.startswith("torch") and half[name] is not None]
    others = [*(half.get(name) for name in ("every_block", "sqrt", "dp")), min(torch, default=None)]
    return [
        title,
        found["n_nodes"],
        " → ".join(f"{size / 1e9:.2f}" for size in least),
        *(plans.get(share, "") for share in SHOWN_SHARES),
        f"{_rounded_s(min(seconds))}{DASH}{_rounded_s(max(seconds))} s",
        *(DASH if other is None else f"{100 * other:.1f}" for other in others),
    ]


def _rounded_s(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 1 else f"{seconds:.0f}"


def _with_gap(cell: Row) -> str:
    """The overhead, followed by the gap to the bound in brackets if that is SHOWN_GAP or more."""
    if cell["gap"] is None or cell["gap"] < SHOWN_GAP:
        return percent(cell["overhead"])
    return f"{percent(cell['overhead'])} ({percent(cell['gap'])})"


def misses_target(cell: Row, *, share: float) -> bool:
    """Whether the gap is above the target for the share of the budget."""
    target = TARGET_GAP if share >= 0.5 else TIGHT_TARGET_GAP
    return cell["gap"] is None or cell["gap"] > target


def worse_than(before: Row, now: Row, *, names: Collection[str]) -> list[str]:
    """Results of these graphs with an overhead higher by more than WORSE_BY than in an earlier
    report, in words."""
    found = []
    for name, row, way in _measured_cells(now):
        earlier = {each["share"]: each for each in before.get(name, {"rows": []})["rows"]}
        known = earlier.get(row["share"], {}).get(way)
        if name in names and known is not None and _is_worse(row[way], known):
            found.append(
                f"{name} at {row['share']}, {way}: {percent(known['overhead'])} -> "
                f"{percent(row[way]['overhead'])}"
            )
    return found


def _measured_cells(graphs: Row) -> Iterator[tuple[str, Row, str]]:
    """Yield (graph, row, way) for each result that was measured."""
    for name, found in graphs.items():
        for row in found["rows"]:
            yield from ((name, row, way) for way in WAYS if way in row)


def _is_worse(cell: Row, known: Row) -> bool:
    if known["overhead"] is None:
        return False
    return cell["overhead"] is None or cell["overhead"] > known["overhead"] + WORSE_BY


def _missed_gaps(graphs: Row, word: str) -> list[str]:
    return [
        f"{name} at {row['share']}: {percent(row[way]['gap'])}"
        for name, row, way in _measured_cells(graphs)
        if way == word and misses_target(row[way], share=row["share"])
    ]


def _worse_with_rewrites(graphs: Row) -> list[str]:
    return [
        f"{name} at {row['share']}: {percent(row['none']['overhead'])} → "
        f"{percent(row[way]['overhead'])}"
        for name, row, way in _measured_cells(graphs)
        if way != "none" and _is_worse(row[way], row["none"])
    ]


def _timed_out(graphs: Row) -> list[str]:
    return [
        f"{name} at {row['share']}, {way}, {row[way]['seconds']:.0f} s"
        for name, row, way in _measured_cells(graphs)
        if row[way]["timed_out"]
    ]


def _list_line(title: str, found: list[str], n_cells: int) -> str:
    return f"{title}: {len(found)} of {n_cells}: {'; '.join(found) or 'none'}."


def _graph_section(name: str, found: Row) -> list[str]:
    """A graph's heading, its sizes, and a row for each share."""
    ways = [way for way in WAYS if way in found["least"]]
    others = list(found["rows"][0]["others"])
    sizes = "; ".join(
        f"rewrites {way}: least budget {least['reached_bytes'] / 1e9:.3f} GB, proven "
        f"{least['proven_bytes'] / 1e9:.3f} GB ({least['seconds']:.1f} s)"
        for way, least in found["least"].items()
    )
    about = (
        f"{found['n_nodes']} ops, {found['n_forward']} of them forward; peak without "
        f"checkpointing {found['baseline_peak_bytes'] / 1e9:.3f} GB; {sizes}."
    )
    head = ["share", "budget GB"]
    for way in ways:
        head += [f"{way}: peak GB", "bound", "auto", "seconds"]
    head += ["with", *others] if "bitwise" in ways else others
    return [
        f"## {name}",
        about,
        table(head, (_detail_cells(row, ways, others) for row in found["rows"])),
    ]


def _detail_cells(row: Row, ways: list[str], others: list[str]) -> list[object]:
    cells: list[object] = [row["share"], f"{row['budget_bytes'] / 1e9:.3f}"]
    for way in ways:
        if way not in row:  # not measured at this share
            cells += [""] * 4
            continue
        cell = row[way]
        peak = "" if cell["peak_bytes"] is None else f"{cell['peak_bytes'] / 1e9:.3f}"
        figures = (percent(cell["bound"]), percent(cell["overhead"]), f"{cell['seconds']:.1f}")
        cells += [peak, *figures]
    if "bitwise" in ways:
        cells.append(", ".join(row["bitwise"]["rewrites"]) if "bitwise" in row else "")
    return [*cells, *(percent(row["others"].get(other)) for other in others)]
