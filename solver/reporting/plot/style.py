"""What the plots share: colours, axes, units, and writing a figure to a file."""

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

# Okabe and Ito's colours, distinguishable for colour-blind readers and in print.
INK, GREY, LIGHT, STONE = "#222222", "#8a8a8a", "#d9d9d9", "#b0b3b8"
PAPER = "#fefefe"
BLUE, RED = "#0072b2", "#d55e00"
ORANGE, GREEN, PINK, SKY = "#e69f00", "#009e73", "#cc79a7", "#56b4e9"
LINE_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, INK)
MARKERS = "osD^vPX"
COLOUR_VARIABLES = {
    "#000000": "--ink",  # what Matplotlib draws axes and text with
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
"""The CSS variable of each colour; the page sets them for light and dark mode."""


WIDE_IN, NARROW_IN = 8.0, 4.0
"""Widths of figures in inches: for a page, and for a phone at the same size of letters."""
LEGEND_IN = -0.55
"""From the axes to the legend: ticks and the label of the axis are between them."""
N_COLUMNS = 1200
"""Steps drawn at most; more than the plot has pixels would only enlarge the file."""


def new_axes(*, width_in: float = WIDE_IN) -> Axes:
    figure = Figure(figsize=(width_in, 4.4), layout="constrained")
    return figure.add_subplot()


def finish(axes: Axes, title: str) -> None:
    """Title, light grid, no frame, the legend below; both as wide as the figure is."""
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
    return width_in(axes) > (WIDE_IN + NARROW_IN) / 2


def printable(text: str) -> str:
    """Without control characters, as graph files are not trusted."""
    return "".join(c if c.isprintable() else "?" for c in text)


def width_in(axes: Axes) -> float:
    """Inches of the figure."""
    return float(_figure_of(axes).get_figwidth())


def size_unit(largest_bytes: int) -> tuple[str, float]:
    """The unit for sizes up to this one, and its bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if largest_bytes >= size:
            return unit, size
    return "B", 1.0


def inline_svg(axes: Axes, *, name: str) -> str:
    """The figure of `axes` as an <svg> element for an HTML page: no URLs, no fixed size.

    Colours become CSS variables (`COLOUR_VARIABLES`), text stays text, the background is
    transparent. name: letters that prefix every id, so that a page can hold several plots.
    """
    written = io.BytesIO()
    # A fixed salt instead of random ids: the same plot is the same bytes.
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
    text = re.sub(  # rounded to hundredths of a point
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
    """Write the figure of `axes` as the suffix says (.png, .svg), whole or not at all."""
    path = Path(path)
    figure = _figure_of(axes)
    written = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    # Without a date and random ids the same plot is the same bytes.
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
    with matplotlib.rc_context({"svg.hashsalt": "checkpoint-solver"}):
        figure.savefig(written, format=kind, **options)
    write_whole(path, written.getvalue())
