"""Overhead against budget: the Pareto curve."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes

from solver.plan_analysis import Curve
from solver.reporting.plot import style
from solver.reporting.plot.of_memory import overhead_text
from solver.reporting.rows import curve_text, describe_host, step_name
from solver.schedule import Solution
from solver.sizes_deadlines_progress import format_size


def pareto(
    curve: Curve,
    ax: Axes | None = None,
    *,
    chosen: Solution | None = None,
    width_in: float = style.WIDE_IN,
) -> Axes:
    """Draw overhead against budget, one line for each method, with the proven bound below.

    ax: where to draw (None: into a new figure).
    chosen: a plan to mark; it need not be on the curve.
    width_in: width of a new figure in inches.
    """
    axes = style.new_axes(width_in=width_in) if ax is None else ax
    budgets = [point.request.budget_bytes for point in curve.points]
    unit, bytes_per_unit = style.size_unit(max(budgets))
    _draw_bound(curve, axes, bytes_per_unit)
    for index, method in enumerate(curve.methods):
        found = [point for point in curve.of(method) if point.overhead is not None]
        axes.plot(
            [point.request.budget_bytes / bytes_per_unit for point in found],
            [100 * (point.overhead or 0.0) for point in found],
            drawstyle="steps-post",
            color=style.LINE_COLOURS[index % len(style.LINE_COLOURS)],
            marker=style.MARKERS[index % len(style.MARKERS)],
            ms=4,
            lw=1.3,
            label=method,
            clip_on=False,  # do not cut off markers on the axis
            zorder=4,
        )
    if chosen is not None and chosen.overhead is not None:
        axes.plot(
            chosen.request.budget_bytes / bytes_per_unit,
            100 * chosen.overhead,
            marker="*",
            ms=14,
            color=style.RED,
            ls="",
            clip_on=False,
            label=f"this plan: {overhead_text(chosen)} at "
            f"{format_size(chosen.request.budget_bytes)}",
            zorder=5,
        )
    if curve.points:
        first = curve.points[0]
        enough = first.baseline.peak_bytes + first.request.reserve_bytes
        label, at = f"baseline fits: {format_size(enough)}", enough / bytes_per_unit
        axes.axvline(at, color=style.GREY, lw=1.0, ls=":", label=label, zorder=2)
    axes.set(xlabel=f"budget ({unit})", ylabel="overhead (% of the baseline step time)")
    axes.set_ylim(0, None)
    title = f"{step_name(curve.graph)}: overhead against budget"
    if curve.points and (places := curve.points[0].request.places) is not None:
        title += f", with {describe_host(places)}"
    style.finish(axes, "; ".join(filter(None, (title, curve_text(curve)))))
    return axes


def _draw_bound(curve: Curve, axes: Axes, bytes_per_unit: float) -> None:
    """Shade what is proven impossible: overheads below the bound, and budgets that nothing fits.

    Between two budgets the bound of the larger one holds, so the line has steps.
    """
    bound = {point.request.budget_bytes: point.lower_bound_overhead for point in curve.points}
    possible = [(size, share) for size, share in sorted(bound.items()) if not math.isinf(share)]
    nothing = [size for size, share in bound.items() if math.isinf(share)]
    sizes = [size / bytes_per_unit for size, _ in possible]
    shares = [100 * share for _, share in possible]
    line: dict[str, Any] = {"color": style.GREY, "lw": 1.0, "ls": "--"}
    axes.plot(sizes, shares, drawstyle="steps-pre", label="proven lower bound", zorder=3, **line)
    axes.fill_between(sizes, shares, step="pre", color=style.LIGHT, alpha=0.7, lw=0, zorder=1)
    if nothing:
        axes.axvspan(
            min(nothing) / bytes_per_unit,
            max(nothing) / bytes_per_unit,
            color=style.RED,
            alpha=0.08,
            lw=0,
            label="proven: nothing fits",
            zorder=1,
        )
