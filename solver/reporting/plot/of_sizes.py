"""Throughput against batch size or sequence length: where more stops paying."""

from __future__ import annotations

from matplotlib.axes import Axes

from solver.analysis import SizeSearch
from solver.reporting.plot.style import BLUE, GREY, RED, finish, legend_below, new_axes

WORDS = {
    "batch_size": ("batch size", "samples per second"),
    "seq_length": ("sequence length", "positions per second, of each sequence"),
}


def throughput(search: SizeSearch, ax: Axes | None = None) -> Axes:
    """What each size that has a plan computes in a second; the largest and the best are marked."""
    axes = new_axes() if ax is None else ax
    size_words, rate_words = WORDS[search.size]
    found = [(c, c.rate_per_s) for c in search.candidates if c.rate_per_s is not None]
    axes.plot([c.size for c, _ in found], [rate for _, rate in found], color=BLUE, lw=1.2, zorder=3)
    for recomputes, label in ((False, "fits as it is"), (True, "fits with recomputation")):
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
    pays, beyond = search.pays_until, search.beyond
    if pays is not None:
        label = f"more pays until {pays.size}"
        axes.axvline(pays.size, color=GREY, lw=1.0, ls=":", label=label, zorder=2)
    if beyond is not None:
        label = f"no plan from {beyond.size} on"
        axes.axvline(beyond.size, color=RED, lw=1.2, ls="--", label=label, zorder=2)
    axes.set(xlabel=size_words, ylabel=rate_words)
    axes.set_ylim(0, 1.08 * max((rate for _, rate in found), default=1.0))
    axes.set_xlim(0, None)
    finish(axes, f"What a larger {size_words} brings")
    legend_below(axes)
    return axes
