"""What the pictures share: colours, axes, sizes, and how a figure becomes a file."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graphs.files import write_whole

# Okabe and Ito's colours: told apart by colour-blind eyes, and in print.
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
"""The CSS variable of each colour: a page sets them for light and for dark."""


def new_axes() -> Axes:
    figure = Figure(figsize=(8.0, 4.4), layout="constrained")
    return figure.add_subplot()


def finish(axes: Axes, title: str) -> None:
    """Title, light grid, no frame."""
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=LIGHT, lw=0.5, zorder=0)
    axes.set_axisbelow(True)


def legend_below(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=3, frameon=False, fontsize=8)


def size_unit(largest_bytes: int) -> tuple[str, float]:
    """The unit that suits sizes up to this one, and its bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if largest_bytes >= size:
            return unit, size
    return "B", 1.0


def inline_svg(axes: Axes, *, name: str) -> str:
    """The figure of `axes` as an <svg> element for an HTML page: no address, no fixed size.

    Colours become CSS variables (`COLOUR_VARIABLES`), text stays text, the ground is transparent.
    name: letters, in front of every id, so that a page can hold several pictures.
    """
    written = io.BytesIO()
    # Ids that do not come from a random number: same picture, same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "checkpoint-solver", "svg.fonttype": "none"}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _figure_of(axes).savefig(written, format="svg", transparent=True, metadata=nothing)
    text = written.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<svg[^>]*>", _root, text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text).replace("xlink:href", "href")
    text = text.replace('href="#', f'href="#{name}-').replace("url(#", f"url(#{name}-")
    text = re.sub(r' (d|x|y|transform)="[^"]*"', _shortened, text)
    for colour, variable in COLOUR_VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.strip()


def _root(tag: re.Match[str]) -> str:
    """The first tag with its view box alone."""
    return re.sub(r'\s(?!viewBox)[\w:]+="[^"]*"', "", tag.group())


def _shortened(attribute: re.Match[str]) -> str:
    """Hundredths of a point are enough."""
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", attribute.group())


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("these axes have been taken off their figure; there is nothing to save")
    return figure


def save(axes: Axes, path: str | Path) -> None:
    """Write the figure of `axes` as the suffix says (.png, .svg), whole or not at all."""
    path = Path(path)
    figure = _figure_of(axes)
    written = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    # Same picture, same bytes: no date, and ids that do not come from a random number.
    options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
    with matplotlib.rc_context({"svg.hashsalt": "checkpoint-solver"}):
        figure.savefig(written, format=kind, **options)
    write_whole(path, written.getvalue())
