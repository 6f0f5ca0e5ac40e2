"""Plot throughput over measured peak: one image per model, with all ways in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

MARKERS = "osv^D*PXh"


def draw(cases: Mapping[str, Any], folder: Path, *, prefix: str = "ways-") -> list[Path]:
    """Write `ways-MODEL.png` (or another prefix) for each model, and return the paths.

    cases: rows of the part "ways".
    """
    by_model: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case, row in cases.items():
        model, way, *_ = case.split("/")
        if row.get("status") == "ran":
            point = (row["peak_bytes"] / 1e9, row["samples_per_s"])
            by_model.setdefault(model, {}).setdefault(way, []).append(point)
    return [
        _draw_model(model, ways, folder / f"{prefix}{model}.png")
        for model, ways in by_model.items()
    ]


def _draw_model(model: str, ways: Mapping[str, list[tuple[float, float]]], path: Path) -> Path:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (way, points) in enumerate(ways.items()):
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, MARKERS[index % len(MARKERS)] + "-", label=way, markersize=5)
    axes.set(xlabel="measured peak of the step (GB)", ylabel="samples per second", title=model)
    axes.set_ylim(0, 1.1 * max(y for points in ways.values() for _, y in points))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return path
