"""Memory over the step as stacked layers: resident, saved, recomputed, gradients, workspace.

The budget is a line, the peak op is named, and the time axis shows where the backward pass and each
block start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graphs.graph import Graph
from solver.chain import split_into_blocks
from solver.common import format_share, format_size
from solver.reporting.plot import style
from solver.schedule import (
    LAYERS,
    OTHERS,
    Occupancy,
    Solution,
    baseline,
    node_at,
    occupancy,
)

COLOUR_OF_LAYER: Mapping[str, str] = {
    "resident": style.STONE,
    OTHERS: style.SKY,
    "kept": style.BLUE,
    "recomputed": style.ORANGE,
    "gradients": style.GREEN,
    "workspace": style.PINK,
}
N_COLUMNS = 1200
"""Steps drawn at most; more than the plot has pixels would only enlarge the file."""
N_NAMED_BLOCKS = 12
"""Blocks numbered on the axis; of more blocks every second, third, ... is."""
LONGEST_NAME = 60
LEAST_ROOM = 0.018
"""Between two block numbers, as a share of the step."""


def memory(solution: Solution, ax: Axes | None = None, *, without_plan: bool = False) -> Axes:
    """Bytes on the device over one step with the plan, in layers; the baseline as a line.

    without_plan: the layers of the baseline, which is also drawn where there is no plan. The
    horizontal axis is the time of the schedule.
    """
    axes = style.new_axes() if ax is None else ax
    request, plain, plan = solution.request, solution.baseline, solution.simulation
    size, bytes_per_unit = style.size_unit(max(plain.peak_bytes, request.budget_bytes))
    longest_s = max(plain.time_s, plan.time_s if plan else 0.0)
    time, s_per_unit = _time_unit(longest_s)
    graph, schedule, shown = solution.plain, baseline(solution.plain), plain
    before = layers = occupancy(graph, schedule)
    if not without_plan and solution.schedule is not None and plan is not None:
        graph, schedule, shown = solution.graph, solution.schedule, plan
        layers = occupancy(graph, schedule, places=request.places)
    _draw_layers(axes, layers, s_per_unit, bytes_per_unit)
    words = f"baseline: {format_size(plain.peak_bytes)}"
    if shown is not plain:
        columns, edges_s = _columns(before)
        sizes = [before.total_bytes[index] / bytes_per_unit for index in columns]
        edges = [edge_s / s_per_unit for edge_s in edges_s]
        axes.stairs(sizes, edges, color=style.INK, lw=0.9, label=words, zorder=3)
        words = f"plan: {format_size(shown.peak_bytes)}, {overhead_text(solution)}"
    if plan is None:
        words += f"; {overhead_text(solution)}"
    available = request.available_bytes / bytes_per_unit
    name = "budget minus reserve" if request.reserve_bytes else "budget"
    label = f"{name}: {format_size(request.available_bytes)}"
    axes.axhline(available, color=style.RED, lw=1.2, ls="--", label=label, zorder=5)
    _mark_times(axes, graph, layers, s_per_unit)
    node = node_at(graph, schedule, shown)
    if node is not None and shown.peak_bytes in layers.total_bytes:
        index = layers.total_bytes.index(shown.peak_bytes)
        middle_s = (layers.edges_s[index] + layers.edges_s[index + 1]) / 2
        text = f"peak {format_size(shown.peak_bytes)} at {_drawable(node.name)}"
        right = middle_s / s_per_unit > 0.6 * (longest_s / s_per_unit)
        _mark_peak(
            axes, middle_s / s_per_unit, shown.peak_bytes / bytes_per_unit, text, right=right
        )
    axes.set(xlabel=f"time in the step ({time})", ylabel=f"device memory ({size})")
    axes.set_xlim(0, longest_s / s_per_unit or None)
    axes.set_ylim(0, 1.18 * max(available, plain.peak_bytes / bytes_per_unit))
    style.finish(axes, f"Memory over one training step; {words}")
    axes.grid(visible=False)
    return axes


def before_and_after(solution: Solution) -> tuple[Axes, ...]:
    """The baseline above the plan, on the same scales; the baseline alone without a plan.

    All axes belong to one figure.
    """
    if solution.simulation is None:
        return (memory(solution),)
    figure = Figure(figsize=(8.0, 7.4), layout="constrained")
    above, below = figure.subplots(2, sharex=True, sharey=True)
    memory(solution, above, without_plan=True)
    above.get_legend().remove()
    above.set_xlabel("")
    memory(solution, below)
    return above, below


def overhead_text(solution: Solution) -> str:
    """ "+4.73 % time", "12 x as long", or that no plan fits."""
    if solution.overhead is None:
        return "no plan fits"
    share = format_share(solution.overhead)
    return share if share.endswith("long") else f"{share} time"


def _time_unit(longest_s: float) -> tuple[str, float]:
    """The unit for times up to this one, and its seconds."""
    units = (("s", 1.0), ("ms", 1e-3))
    return next(((unit, s) for unit, s in units if longest_s >= s), ("us", 1e-6))


def _columns(layers: Occupancy) -> tuple[list[int], list[float]]:
    """The computes to draw: all, or the fullest of each of N_COLUMNS intervals of time.

    With the edges of the drawn steps in seconds: each lasts until the next one starts.
    """
    totals, edges_s = layers.total_bytes, layers.edges_s
    if len(totals) <= N_COLUMNS:
        return list(range(len(totals))), list(edges_s)
    end_s = edges_s[-1] or 1.0
    fullest: dict[int, int] = {}
    for index, total_bytes in enumerate(totals):
        interval = min(N_COLUMNS - 1, int(N_COLUMNS * edges_s[index] / end_s))
        if interval not in fullest or total_bytes > totals[fullest[interval]]:
            fullest[interval] = index
    columns = list(fullest.values())  # the first interval starts with the step
    return columns, [0.0, *(edges_s[index] for index in columns[1:]), edges_s[-1]]


def _draw_layers(axes: Axes, layers: Occupancy, s_per_unit: float, bytes_per_unit: float) -> None:
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
    """Mark where the backward pass starts, and along the axis where each block does."""
    forward, backward = block_starts(graph, layers)
    turn = _turn(layers)
    for starts in (forward, backward):
        times = [time_s / s_per_unit for time_s, _ in starts]
        axes.vlines(
            times, 0, 0.025, transform=axes.get_xaxis_transform(), color=style.INK, lw=0.6, zorder=4
        )
    every = -(-len(forward) // N_NAMED_BLOCKS) if forward else 1
    room_s = LEAST_ROOM * layers.edges_s[-1]
    last_s = -room_s
    for time_s, block in (*forward, *backward):
        if len(forward) > 1 and (block - 1) % every == 0 and time_s - last_s >= room_s:
            _write(axes, time_s / s_per_unit, 0.03, str(block), va="bottom", size=6)
            last_s = time_s
    if turn is None:
        return
    axes.axvline(turn / s_per_unit, color=style.INK, lw=0.8, ls=":", zorder=4)
    _write(axes, turn / s_per_unit, 0.995, "backward", va="top", size=8)
    if turn > 0:
        blocks = f", {len(forward)} blocks" if len(forward) > 1 else ""
        _write(axes, 0.0, 0.995, f"forward{blocks}", va="top", size=8)


def _write(axes: Axes, x: float, y: float, text: str, *, va: str, size: float) -> None:
    """Write at a time and at a share of the height."""
    axes.annotate(
        text,
        (x, y),
        xycoords=("data", "axes fraction"),
        xytext=(2, 0),
        textcoords="offset points",
        color=style.INK,
        fontsize=size,
        va=va,
        zorder=6,
    )


def block_starts(
    graph: Graph, layers: Occupancy
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """When each block's forward ops start, and its backward ops: (seconds, block), blocks from 1.

    Recomputation belongs to the backward segment that needs it.
    """
    blocks = split_into_blocks(graph)
    first_s: dict[str, float] = {}
    for node, start_s in zip(layers.nodes, layers.edges_s, strict=False):
        first_s.setdefault(node.name, start_s)

    def starts(segments: Iterable[Sequence[str]]) -> list[tuple[float, int]]:
        found = (
            (min(first_s[name] for name in names), block)
            for block, names in enumerate(segments, start=1)
            if names
        )
        return sorted(found)

    return starts(blocks.forward), starts(blocks.backward[: blocks.n_blocks])


def _turn(layers: Occupancy) -> float | None:
    """When the forward pass ends, in seconds: after the last first computation of it."""
    seen: set[str] = set()
    turn = None
    ends_s = accumulate(node.time_s for node in layers.nodes)
    for node, end_s in zip(layers.nodes, ends_s, strict=True):
        if node.phase == "forward" and node.name not in seen:
            seen.add(node.name)
            turn = end_s
    return turn


def _mark_peak(axes: Axes, x: float, y: float, text: str, *, right: bool) -> None:
    """A point at the peak, with the op's name to its left if it is on the right."""
    axes.plot([x], [y], marker="o", ms=4, color=style.INK, ls="", zorder=7)
    axes.annotate(
        text,
        (x, y),
        xytext=(-5 if right else 5, 7),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        color=style.INK,
        fontsize=8,
        parse_math=False,
        bbox={"boxstyle": "square,pad=0.15", "fc": style.PAPER, "ec": "none", "alpha": 0.8},
        zorder=7,
    )


def _drawable(name: str) -> str:
    """A printable, short name, as graph files are not trusted."""
    shown = "".join(c if c.isprintable() else "?" for c in name)
    return shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…"
