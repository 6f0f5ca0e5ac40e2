"""Plot throughput against batch size or sequence length."""

from __future__ import annotations

from matplotlib.axes import Axes

from solver.plan_analysis import SizeSearch
from solver.reporting.plot.style import BLUE, GREY, RED, WIDE_IN, finish, new_axes
from solver.reporting.rows import step_name
from solver.reporting.size_rows import misfit_text, saturation_text

AXIS_LABELS = {
    "batch_size": ("batch size", "samples per second"),
    "seq_length": ("sequence length", "positions per second, of each sequence"),
}


def throughput(search: SizeSearch, ax: Axes | None = None, *, width_in: float = WIDE_IN) -> Axes:
    """Draw the throughput of each size that fits; mark saturation and the first size that fails.

    ax: where to draw (None: into a new figure of width `width_in` in inches).
    """
    axes = new_axes(width_in=width_in) if ax is None else ax
    size_label, rate_label = AXIS_LABELS[search.size]
    found = [(c, c.rate_per_s) for c in search.candidates if c.rate_per_s is not None]
    axes.plot([c.size for c, _ in found], [rate for _, rate in found], color=BLUE, lw=1.2, zorder=3)
    for recomputes, label in ((False, "without recomputation"), (True, "with recomputation")):
        some = [(c, r) for c, r in found if (c.solution.simulation.n_recomputed > 0) == recomputes]  # type: ignore[union-attr]
        if some:
            axes.plot(
                [c.size for c, _ in some],
                [rate for _, rate in some],
                marker="o",
                ms=5,
                mfc=BLUE if recomputes else "none",
                mec=BLUE,
                ls="",
                label=label,
                zorder=4,
            )
    if search.saturation is not None:
        label = f"throughput {saturation_text(search)}"
        axes.axvline(search.saturation.size, color=GREY, lw=1.0, ls=":", label=label, zorder=2)
    if search.beyond is not None:
        label = f"from {search.beyond.size} on {misfit_text(search.beyond)}"
        axes.axvline(search.beyond.size, color=RED, lw=1.2, ls="--", label=label, zorder=2)
    axes.set(xlabel=size_label, ylabel=rate_label)
    axes.set_ylim(0, 1.08 * max((rate for _, rate in found), default=1.0))
    axes.set_xlim(0, None)
    step = step_name(search.candidates[0].solution.plain)
    finish(axes, f"{step}: throughput against {size_label}")
    return axes
