"""Plot memory over the step in stacked layers: resident, saved, recomputed, gradients, workspace.

The budget is drawn as a line and the peak op is named; the time axis marks the start of the
backward pass and of each block.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graphs.graph import Graph
from solver.chain import computing_blocks
from solver.plan_analysis import block_names, copies
from solver.reporting.plot import style
from solver.reporting.plot.of_copies import streams
from solver.reporting.rows import headline, step_name
from solver.schedule import (
    LAYERS,
    OTHER_MICRO_BATCHES,
    Occupancy,
    Solution,
    baseline,
    node_at,
    occupancy,
)
from solver.sizes_deadlines_progress import format_share, format_size

COLOUR_OF_LAYER: Mapping[str, str] = {
    "resident": style.STONE,
    OTHER_MICRO_BATCHES: style.SKY,
    "kept": style.BLUE,
    "recomputed": style.ORANGE,
    "gradients": style.GREEN,
    "workspace": style.PINK,
}
N_NAMED_BLOCKS = 30
"""How many blocks are named on the axis at most."""
LONGEST_BLOCK = 18
"""How many letters of a block's name are shown at most."""
LEAST_NAME_GAP_IN = 0.13
"""Least distance in inches between the names of two blocks."""
HEADROOM = 1.32
"""Top of the plot as a multiple of the highest line: room for the names of peak op and passes."""
LETTER_POINTS = 4.7
"""Average width of a letter in the axes, in points."""
PEAK_LABEL = 1.04
"""Height of the name of the peak op, as a multiple of the highest line."""


def memory(
    solution: Solution,
    ax: Axes | None = None,
    *,
    without_plan: bool = False,
    width_in: float = style.WIDE_IN,
) -> Axes:
    """Draw the bytes on the device over one step with the plan in layers, the baseline as a line.

    The horizontal axis is the time in the schedule.

    ax: where to draw (None: into a new figure of width `width_in` in inches).
    without_plan: draw the layers of the baseline, as is also done if there is no plan.
    """
    axes = style.new_axes(width_in=width_in) if ax is None else ax
    request, plain, plan = solution.request, solution.baseline, solution.simulation
    size, bytes_per_unit = style.size_unit(max(plain.peak_bytes, request.budget_bytes))
    longest_s = _longest_s(solution)
    time, s_per_unit = _time_unit(longest_s)
    graph, schedule, shown = solution.unplanned, baseline(solution.unplanned), plain
    before = layers = occupancy(graph, schedule)
    if not without_plan and solution.schedule is not None and plan is not None:
        graph, schedule, shown = solution.graph, solution.schedule, plan
        layers = occupancy(graph, schedule, places=request.places)
    _draw_layers(axes, layers, s_per_unit, bytes_per_unit)
    plan_text = f"baseline: {format_size(plain.peak_bytes)}"
    if shown is not plain:
        columns, edges_s = _columns(before)
        sizes = [before.total_bytes[index] / bytes_per_unit for index in columns]
        edges = [edge_s / s_per_unit for edge_s in edges_s]
        axes.stairs(sizes, edges, color=style.INK, lw=0.9, label=plan_text, zorder=3)
        plan_text = f"plan: {format_size(shown.peak_bytes)}, {overhead_text(solution)}"
    if plan is None:
        plan_text += f"; {overhead_text(solution)}"
    available = request.available_bytes / bytes_per_unit
    name = "budget minus reserve" if request.reserve_bytes else "budget"
    label = f"{name}: {format_size(request.available_bytes)}"
    axes.axhline(available, color=style.RED, lw=1.2, ls="--", label=label, zorder=5)
    axes.set(xlabel=f"time in the step ({time})", ylabel=f"device memory ({size})")
    axes.set_xlim(0, longest_s / s_per_unit or None)
    highest = max(available, plain.peak_bytes / bytes_per_unit)
    axes.set_ylim(0, HEADROOM * highest)
    # The blocks are always the plan's, so that they have the same numbers without the plan, whose
    # graph may be divided into other blocks.
    _mark_times(axes, solution.graph, layers, s_per_unit)
    # name the peak op, if the peak is during a compute
    node = node_at(graph, schedule, shown)
    if node is not None and shown.peak_bytes in layers.total_bytes:
        index = layers.total_bytes.index(shown.peak_bytes)
        middle_s = (layers.edges_s[index] + layers.edges_s[index + 1]) / 2
        name, n_letters = style.printable(node.name), int(5.5 * style.width_in(axes))
        name = name if len(name) <= n_letters else name[: n_letters - 1] + "…"
        text = f"peak {format_size(shown.peak_bytes)} at {name}"
        at = middle_s / s_per_unit, shown.peak_bytes / bytes_per_unit
        _mark_peak(axes, at, text, height=PEAK_LABEL * highest)
    title = plan_text if ax is not None else f"{step_name(solution.plain)}; {plan_text}"
    style.finish(axes, title)
    axes.grid(visible=False)
    return axes


def before_and_after(solution: Solution, *, width_in: float = style.WIDE_IN) -> tuple[Axes, ...]:
    """Draw the baseline above the plan on the same scales, and the streams of a plan with copies
    below. Without a plan only the baseline is drawn.

    Returns the axes from top to bottom; all belong to one figure.
    """
    if solution.simulation is None:
        return (memory(solution, width_in=width_in),)
    found = copies(solution)
    heights = [3.6, 3.6] if found is None else [3.6, 3.6, 0.7 + 0.45 * len(found.streams)]
    figure = Figure(figsize=(width_in, sum(heights) + 0.9), layout="constrained")
    title = f"{step_name(solution.plain)}: {headline(solution)}"
    figure.suptitle(
        textwrap.fill(style.printable(title), int(11 * width_in)),
        x=0.01,
        ha="left",
        fontsize=11,
        parse_math=False,
    )
    all_axes = figure.subplots(len(heights), height_ratios=heights, sharex=True)
    above, below = all_axes[:2]
    above.sharey(below)
    memory(solution, above, without_plan=True)
    above.get_legend().remove()
    above.set_xlabel("")
    memory(solution, below)
    if found is None:
        return above, below
    time, s_per_unit = _time_unit(_longest_s(solution))
    streams(solution, found, all_axes[2], s_per_unit=s_per_unit)
    all_axes[2].set_xlabel(f"time in the step ({time})")
    return above, below, all_axes[2]


def _longest_s(solution: Solution) -> float:
    """Seconds of the longer of baseline and plan."""
    plan = solution.simulation
    return max(solution.baseline.time_s, plan.time_s if plan else 0.0)


def overhead_text(solution: Solution) -> str:
    """The overhead as text: "+4.73 % time", "12 x as long", or "no plan fits"."""
    if solution.overhead is None:
        return "no plan fits"
    share = format_share(solution.overhead)
    return share if share.endswith("long") else f"{share} time"


def _time_unit(longest_s: float) -> tuple[str, float]:
    """The unit for an axis with times up to this one, and its seconds."""
    units = (("s", 1.0), ("ms", 1e-3))
    return next(((unit, s) for unit, s in units if longest_s >= s), ("us", 1e-6))


def _columns(layers: Occupancy) -> tuple[list[int], list[float]]:
    """The indices of the computes to draw, and the edges of the drawn intervals in seconds.

    All computes are drawn if there are few; else, of each of style.N_COLUMNS intervals of time, the
    one with the most bytes. Each is drawn until the next one starts.
    """
    totals, edges_s = layers.total_bytes, layers.edges_s
    if len(totals) <= style.N_COLUMNS:
        return list(range(len(totals))), list(edges_s)
    end_s = edges_s[-1] or 1.0
    fullest: dict[int, int] = {}
    for index, total_bytes in enumerate(totals):
        interval = min(style.N_COLUMNS - 1, int(style.N_COLUMNS * edges_s[index] / end_s))
        if interval not in fullest or total_bytes > totals[fullest[interval]]:
            fullest[interval] = index
    columns = list(fullest.values())  # the first one is drawn from the start of the step
    return columns, [0.0, *(edges_s[index] for index in columns[1:]), edges_s[-1]]


def _draw_layers(axes: Axes, layers: Occupancy, s_per_unit: float, bytes_per_unit: float) -> None:
    """Draw the layers on top of each other, in the order of LAYERS."""
    columns, edges_s = _columns(layers)
    if not columns:
        return
    edges = [edge_s / s_per_unit for edge_s in edges_s]
    below = np.zeros(len(columns))
    for name in LAYERS:
        sizes = np.array([layers.layer_bytes[name][index] for index in columns])
        above = below + sizes / bytes_per_unit
        if sizes.any():
            axes.stairs(
                above,
                edges,
                baseline=below,
                fill=True,
                color=COLOUR_OF_LAYER[name],
                alpha=0.85,
                lw=0,
                label="saved activations" if name == "kept" else name,
                zorder=2,
            )
        below = above


def _mark_times(axes: Axes, graph: Graph, layers: Occupancy, s_per_unit: float) -> None:
    """Mark where the backward pass starts and, along the axis, where each block starts."""
    forward, backward = block_starts(graph, layers)
    forward_end_s = _forward_end_s(layers)
    for starts in (forward, backward):
        times = [time_s / s_per_unit for time_s, _ in starts]
        axes.vlines(
            times, 0, 0.025, transform=axes.get_xaxis_transform(), color=style.INK, lw=0.6, zorder=4
        )
    if len(forward) > 1:
        _name_blocks(axes, block_names(graph), (*forward, *backward), s_per_unit)
    if forward_end_s is None:
        return
    at = forward_end_s / s_per_unit
    # leave a gap in the line for the name of the peak op
    for low, high in ((0, PEAK_LABEL - 0.01), (HEADROOM - 0.1, HEADROOM)):
        line: dict[str, Any] = {"color": style.INK, "lw": 0.8, "ls": ":", "zorder": 4}
        axes.axvline(at, low / HEADROOM, high / HEADROOM, **line)
    _annotate_top(axes, at, "backward")
    blocks = f", {len(forward)} blocks" if len(forward) > 1 else ""
    room_points = at / (axes.get_xlim()[1] or 1.0) * _width_points(axes)
    for words in (f"forward{blocks}", "forward"):
        if LETTER_POINTS * len(words) < room_points:
            _annotate_top(axes, 0.0, words)
            break


def _name_blocks(
    axes: Axes, names: Sequence[str], starts: Iterable[tuple[float, int]], s_per_unit: float
) -> None:
    """Write the blocks' numbers and modules above the axes, as far as there is room.

    starts: (seconds, block) in order of time.
    """
    room = (
        max(1 / N_NAMED_BLOCKS, 72 * LEAST_NAME_GAP_IN / _width_points(axes)) * axes.get_xlim()[1]
    )
    places: list[float] = []
    labels: list[str] = []
    for time_s, block in starts:
        at = time_s / s_per_unit
        if not places or at - places[-1] >= room:
            places.append(at)
            name = style.printable(names[block - 1])
            if len(name) > LONGEST_BLOCK:  # keep the end, which tells modules apart
                name = "…" + name[1 - LONGEST_BLOCK :]
            labels.append(f"{block} {name}".strip())
    top = axes.secondary_xaxis("top")
    top.set_xticks(places, labels, rotation=50, ha="left", rotation_mode="anchor", fontsize=6)
    for label in top.get_xticklabels():
        label.set_parse_math(False)
    top.tick_params(length=2, pad=1, colors=style.INK)
    top.spines["top"].set_visible(False)


def _annotate_top(axes: Axes, x: float, text: str) -> None:
    """Write text at the top of the axes, to the right of x on the time axis."""
    axes.annotate(
        text,
        (x, 0.99),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        color=style.INK,
        fontsize=8,
        va="top",
        zorder=6,
    )


def block_starts(
    graph: Graph, layers: Occupancy
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """When the forward ops of each block start, and when its backward ops do.

    graph: divided into the blocks. layers: of this step, or of the same step with other rewrites.

    Both are lists of (seconds, block) in order of time, with blocks from 1. Only the first run of
    an op counts, so recomputation starts no block.
    """
    blocks = computing_blocks(graph)
    first_s: dict[str, float] = {}
    for node, start_s in zip(layers.nodes, layers.edges_s, strict=False):
        first_s.setdefault(node.name, start_s)

    def starts(segments: Iterable[Sequence[str]]) -> list[tuple[float, int]]:
        found_s = (
            (min((first_s[name] for name in names if name in first_s), default=None), block)
            for block, names in enumerate(segments, start=1)
        )
        return sorted((time_s, block) for time_s, block in found_s if time_s is not None)

    return starts(blocks.forward), starts(blocks.backward[: blocks.n_blocks])


def _forward_end_s(layers: Occupancy) -> float | None:
    """When the forward pass ends, in seconds: after the last first run of a forward node."""
    seen: set[str] = set()
    forward_end_s = None
    for node, start_s in zip(layers.nodes, layers.edges_s, strict=False):
        if node.phase == "forward" and node.name not in seen:
            seen.add(node.name)
            forward_end_s = start_s + node.time_s
    return forward_end_s


def _mark_peak(axes: Axes, at: tuple[float, float], text: str, *, height: float) -> None:
    """Draw a point at the peak, and the op's name above all lines, joined by a thin line.

    at: the peak in units of the axes. height: the height of the name.
    """
    longest, room_points = axes.get_xlim()[1] or 1.0, _width_points(axes)
    wide_points = LETTER_POINTS * len(text)
    at_points = at[0] / longest * room_points
    middle_points = max(wide_points / 2, min(at_points, room_points - wide_points / 2))
    off_points = at_points - middle_points  # not 0 near the edges: the name is off to one side
    axes.plot(*at, marker="o", ms=4, color=style.INK, ls="", zorder=7)
    axes.annotate(
        text,
        at,
        xytext=(middle_points / room_points * longest, height),
        ha="center",
        va="bottom",
        color=style.INK,
        fontsize=8,
        parse_math=False,
        arrowprops={
            "arrowstyle": "-",
            "color": style.INK,
            "lw": 0.6,
            "shrinkA": 0,
            "shrinkB": 2,
            "relpos": (min(1.0, max(0.0, 0.5 + off_points / wide_points)), 0),
        },
        zorder=7,
    )


def _width_points(axes: Axes) -> float:
    """Approximate width of the axes in points: the layout is not known before drawing."""
    return (0.8 if style.is_wide(axes) else 0.72) * 72 * style.width_in(axes)
