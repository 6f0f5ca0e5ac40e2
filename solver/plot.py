"""Pictures: memory over the step, and overhead against budget.

Each function draws into `ax`, or into a figure of its own that belongs to nobody (no pyplot state),
and returns the axes. `save` writes the figure, whole or not at all.
"""

from __future__ import annotations

import io
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graphs.files import write_whole
from graphs.graph import Graph
from solver.budget import format_size
from solver.pareto import Curve
from solver.rematerialise import baseline
from solver.schedule import Compute, Schedule
from solver.simulate import Trace
from solver.solution import Solution

# Okabe and Ito's colours: told apart by colour-blind eyes, and in print.
INK, GREY, LIGHT = "#222222", "#8a8a8a", "#d9d9d9"
BLUE, RED = "#0072b2", "#d55e00"
LINE_COLOURS = (BLUE, "#e69f00", "#009e73", "#cc79a7", "#56b4e9", RED, INK)
MARKERS = "osD^vPX"


def memory(solution: Solution, ax: Axes | None = None) -> Axes:
    """Bytes on the device over one step, without checkpointing and with the plan.

    The horizontal axis is the schedule's time, so the plan's longer step is seen as longer.
    """
    axes = _axes() if ax is None else ax
    graph, request = solution.graph, solution.request
    unit, bytes_per_unit = _size_unit(max(solution.baseline.peak_bytes, request.budget_bytes))
    scale = _TimeScale(solution)
    plain = _Line(graph, baseline(graph), solution.baseline, scale, bytes_per_unit)
    axes.stairs(plain.heights, plain.edges, fill=True, color=LIGHT, zorder=1)
    label = f"without checkpointing: {format_size(solution.baseline.peak_bytes)}"
    axes.stairs(plain.heights, plain.edges, color=GREY, lw=1.0, label=label, zorder=2)
    if solution.schedule is not None and solution.trace is not None:
        plan = _Line(graph, solution.schedule, solution.trace, scale, bytes_per_unit)
        label = f"with the plan: {format_size(solution.trace.peak_bytes)}"
        axes.stairs(plan.heights, plan.edges, color=BLUE, lw=1.2, label=label, zorder=4)
        plan.mark_backward(axes, BLUE)
    plain.mark_backward(axes, GREY, label="backward")
    available = request.available_bytes / bytes_per_unit
    name = "budget" if not request.reserve_bytes else "budget less reserve"
    label = f"{name}: {format_size(request.available_bytes)}"
    axes.axhline(available, color=RED, lw=1.2, ls="--", label=label, zorder=3)
    resident = graph.resident_bytes / bytes_per_unit
    label = f"resident: {format_size(graph.resident_bytes)}"
    axes.axhspan(0, resident, color=INK, alpha=0.16, lw=0, label=label, zorder=2)
    axes.set(xlabel=f"time in the step ({scale.unit})", ylabel=f"on the device ({unit})")
    axes.set_xlim(0, None)
    axes.set_ylim(0, 1.1 * max(available, plain.top))
    _finish(axes, f"Memory over one training step, {_overhead_words(solution)}")
    return axes


def pareto(curve: Curve, ax: Axes | None = None, *, chosen: Solution | None = None) -> Axes:
    """Overhead against budget, a line for each method, above the proven bound.

    chosen: an answer to mark, on the curve or off it.
    """
    axes = _axes() if ax is None else ax
    budgets = [point.request.budget_bytes for point in curve.points]
    unit, bytes_per_unit = _size_unit(max(budgets))
    _draw_bound(curve, axes, bytes_per_unit)
    for index, method in enumerate(curve.methods):
        found = [point for point in curve.of(method) if point.overhead is not None]
        axes.plot(
            [point.request.budget_bytes / bytes_per_unit for point in found],
            [100 * (point.overhead or 0.0) for point in found],
            drawstyle="steps-post",
            color=LINE_COLOURS[index % len(LINE_COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            ms=4,
            lw=1.3,
            label=method,
            clip_on=False,  # a marker on the axis is whole
            zorder=4,
        )
    if chosen is not None and chosen.overhead is not None:
        axes.plot(
            chosen.request.budget_bytes / bytes_per_unit,
            100 * chosen.overhead,
            marker="*",
            ms=14,
            color=RED,
            ls="",
            label=f"this plan: {_overhead_words(chosen)} in "
            f"{format_size(chosen.request.budget_bytes)}",
            zorder=5,
        )
    if curve.points:
        first = curve.points[0]
        enough = first.baseline.peak_bytes + first.request.reserve_bytes
        label = f"fits without checkpointing: {format_size(enough)}"
        axes.axvline(enough / bytes_per_unit, color=GREY, lw=1.0, ls=":", label=label, zorder=2)
    axes.set(xlabel=f"budget ({unit})", ylabel="overhead (% of the step's time)")
    axes.set_ylim(0, None)
    _finish(axes, "What a smaller budget costs")
    return axes


def save(axes: Axes, path: str | Path) -> None:
    """Write the figure of `axes` as the suffix says (.png, .svg), whole or not at all."""
    path = Path(path)
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("these axes have been taken off their figure; there is nothing to save")
    written = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    # Same picture, same bytes: no date, and ids that do not come from a random number.
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
    with matplotlib.rc_context({"svg.hashsalt": "checkpoint-solver"}):
        figure.savefig(written, format=kind, **options)
    write_whole(path, written.getvalue())


class _TimeScale:
    """Seconds in a unit that suits the longest of the lines."""

    def __init__(self, solution: Solution) -> None:
        longest_s = max(solution.baseline.time_s, solution.trace.time_s if solution.trace else 0.0)
        self.unit, self.s_per_unit = next(
            ((unit, s) for unit, s in (("s", 1.0), ("ms", 1e-3)) if longest_s >= s), ("us", 1e-6)
        )


class _Line:
    """A schedule as stairs: one step per compute, as wide as it takes time."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        trace: Trace,
        scale: _TimeScale,
        bytes_per_unit: float,
    ) -> None:
        computes = [
            (graph.node_by_name[op.node], live_bytes)
            for op, live_bytes in zip(schedule.ops, trace.live_bytes, strict=True)
            if isinstance(op, Compute)
        ]
        widths = [node.time_s / scale.s_per_unit for node, _ in computes]
        self.edges = list(accumulate(widths, initial=0.0))
        self.heights = [live_bytes / bytes_per_unit for _, live_bytes in computes]
        self.top = trace.peak_bytes / bytes_per_unit
        turns = (i for i, (node, _) in enumerate(computes) if node.phase != "forward")
        self._turn = next((self.edges[i] for i in turns), None)

    def mark_backward(self, axes: Axes, colour: str, *, label: str = "") -> None:
        """A line where the first op after the forward pass starts."""
        if self._turn is None:
            return
        axes.axvline(self._turn, color=colour, lw=0.8, ls=":", zorder=2)
        axes.annotate(
            label,
            (self._turn, 0.995),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            color=colour,
            fontsize=8,
            va="top",
        )


def _draw_bound(curve: Curve, axes: Axes, bytes_per_unit: float) -> None:
    """What is proven to be out of reach: less overhead than the bound, budgets that fit nothing.

    Between two budgets the bound of the larger one holds, so the line is stairs as well.
    """
    bound = {point.request.budget_bytes: point.lower_bound_overhead for point in curve.points}
    possible = [(size, share) for size, share in sorted(bound.items()) if not math.isinf(share)]
    nothing = [size for size, share in bound.items() if math.isinf(share)]
    sizes = [size / bytes_per_unit for size, _ in possible]
    shares = [100 * share for _, share in possible]
    style: dict[str, Any] = {"color": GREY, "lw": 1.0, "ls": "--"}
    axes.plot(sizes, shares, drawstyle="steps-pre", label="proven lower bound", zorder=3, **style)
    axes.fill_between(sizes, shares, step="pre", color=LIGHT, alpha=0.7, lw=0, zorder=1)
    if nothing:
        axes.axvspan(
            min(nothing) / bytes_per_unit,
            max(nothing) / bytes_per_unit,
            color=RED,
            alpha=0.08,
            lw=0,
            label="proven: nothing fits",
            zorder=1,
        )


def _axes() -> Axes:
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    return figure.add_subplot()


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=LIGHT, lw=0.5, zorder=0)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=3, frameon=False, fontsize=8)


def _overhead_words(solution: Solution) -> str:
    if solution.overhead is None:
        return "no plan fits"
    return f"{100 * solution.overhead:+.2f} % time"


def _size_unit(largest_bytes: int) -> tuple[str, float]:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if largest_bytes >= size:
            return unit, size
    return "B", 1.0
