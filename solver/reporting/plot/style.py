"""Shared by the plots: colours, axes, units, and writing a figure to a file."""

from __future__ import annotations

import io
import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from graphs.files import write_whole

# The colours of Okabe and Ito can be told apart by colour-blind readers and in print.
INK, GREY, LIGHT, STONE = "#222222", "#8a8a8a", "#d9d9d9", "#b0b3b8"
PAPER = "#fefefe"
BLUE, RED = "#0072b2", "#d55e00"
ORANGE, GREEN, PINK, SKY = "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
LINE_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, INK)
MARKERS = "osD^vPX"
COLOUR_VARIABLES = {
    "#000000": "--ink",  # Matplotlib's colour for axes and text
    INK: "--ink",
    PAPER: "--ground",
    GREY: "--grey",
    LIGHT: "--rule",
    STONE: "--stone",
    BLUE: "--blue",
    RED: "--red",
    ORANGE: "--orange",
    GREEN: "--green",
    PINK: "--pink",
    SKY: "--sky",
}
"""Colour -> CSS variable; the page sets the variables for light and dark mode."""


WIDE_IN, NARROW_IN = 8.0, 4.0
"""Widths of figures in inches: for a page, and for a phone with the same font size."""
LEGEND_IN = -0.55
"""Offset in inches from the axes down to the legend, below the ticks and the axis label."""
N_COLUMNS = 1200
"""How many time intervals are drawn at most; more than the plot's pixels only enlarge the file."""


def new_axes(*, width_in: float = WIDE_IN) -> Axes:
    """Axes in a new figure that pyplot does not know."""
    figure = Figure(figsize=(width_in, 4.4), layout="constrained")
    return figure.add_subplot()


def finish(axes: Axes, title: str) -> None:
    """Add title, light grid and a legend below, and remove the frame. Title and legend are laid out
    for the figure's width."""
    text = textwrap.fill(printable(title), int(9 * width_in(axes)))
    axes.set_title(text, loc="left", fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=LIGHT, lw=0.5, zorder=0)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        under_the_label = ScaledTranslation(0, LEGEND_IN, _figure_of(axes).dpi_scale_trans)
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=axes.transAxes + under_the_label,
            ncols=3 if is_wide(axes) else 1,
            frameon=False,
            fontsize=8,
        )


def is_wide(axes: Axes) -> bool:
    """Whether the figure is for a page and not for a phone."""
    return width_in(axes) > (WIDE_IN + NARROW_IN) / 2


def printable(text: str) -> str:
    """Replace control characters by "?", since graph files are not trusted."""
    return "".join(c if c.isprintable() else "?" for c in text)


def width_in(axes: Axes) -> float:
    """The figure's width in inches."""
    return float(_figure_of(axes).get_figwidth())


def size_unit(largest_bytes: int) -> tuple[str, float]:
    """The unit for an axis with sizes up to this one, and its bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if largest_bytes >= size:
            return unit, size
    return "B", 1.0


def inline_svg(axes: Axes, *, name: str) -> str:
    """The figure of `axes` as an <svg> element for an HTML page, without URLs or a fixed size.

    Colours become CSS variables (`COLOUR_VARIABLES`), text stays text, and the background is
    transparent.

    name: a prefix for every id, so that a page can contain several plots.
    """
    written = io.BytesIO()
    # With a fixed salt instead of random ids, the same plot gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "checkpoint-solver", "svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _figure_of(axes).savefig(written, format="svg", transparent=True, metadata=nothing)
    text = written.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)
    root, _, rest = text.partition(">")
    text = re.sub(r'\s(?!viewBox)[\w:]+="[^"]*"', "", root) + ">" + rest
    text = re.sub(r'\bid="', f'id="{name}-', text).replace("xlink:href", "href")
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    text = re.sub(  # round to hundredths of a point
        r' (d|x|y|transform)="[^"]*"',
        lambda attribute: re.sub(r"(\d+\.\d\d)\d+", r"\1", attribute.group()),
        text,
    )
    for colour, variable in COLOUR_VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("these axes have been removed from their figure: nothing to save")
    return figure


def save(axes: Axes, path: str | Path) -> None:
    """Write the figure of `axes` atomically, in the format of the suffix (.png, .svg)."""
    path = Path(path)
    figure = _figure_of(axes)
    written = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    # Without a date and random ids, the same plot gives the same bytes.
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
    with matplotlib.rc_context({"svg.hashsalt": "checkpoint-solver"}):
        figure.savefig(written, format=kind, **options)
    write_whole(path, written.getvalue())
