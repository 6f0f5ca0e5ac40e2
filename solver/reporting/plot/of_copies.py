"""Plot the streams of a plan with copies: computation, copies in each direction, and stalls."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes

from solver.plan_analysis import Copies, Stream
from solver.reporting.copy_rows import copies_title
from solver.reporting.plot import style
from solver.schedule import Event, Solution
from solver.sizes_deadlines_progress import format_size, format_time

HALF = 0.36
"""Half the height of a row, in rows."""
COLOUR_OF_STREAM = {
    "compute": style.BLUE,
    "store": style.ORANGE,
    "fetch": style.GREEN,
    "spill": style.PINK,
    "load": style.SKY,
}


def streams(solution: Solution, found: Copies, axes: Axes, *, s_per_unit: float) -> Axes:
    """Draw one row for each stream, from the top: when it runs something, and in red when compute
    waits for a copy. The lowest row is the use of host memory, as a share of its peak.

    s_per_unit: seconds per unit of the time axis.
    """
    assert solution.simulation is not None
    rows = {stream.name: len(found.streams) - i for i, stream in enumerate(found.streams)}
    least_s = found.end_s / style.N_COLUMNS
    for name, row in rows.items():
        runs = _merge_close_events((e for e in found.events if e.stream == name), least_s)
        spans = [(start / s_per_unit, (stop - start) / s_per_unit) for start, stop in runs]
        colour = COLOUR_OF_STREAM[name]
        axes.broken_barh(spans, (row - HALF, 2 * HALF), color=colour, lw=0, zorder=2)
    if found.stalls:
        stall_spans = [(s.start_s / s_per_unit, s.time_s / s_per_unit) for s in found.stalls]
        place = (rows["compute"] - HALF, 2 * HALF)
        label = "nothing is computed: waiting for copies"
        axes.broken_barh(stall_spans, place, color=style.RED, lw=0, label=label, zorder=3)
    most_bytes = solution.simulation.host_peak_bytes
    _draw_host(axes, found, most_bytes, s_per_unit)
    is_wide = style.is_wide(axes)
    names = {rows[stream.name]: _title(stream, is_wide) for stream in found.streams}
    names[0] = f"on the host,\n{'at most ' if is_wide else ''}{format_size(most_bytes)}"
    axes.set_yticks(list(names), list(names.values()), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(rows) + 0.6)
    stalls = f"{format_time(solution.simulation.stall_s)} of it not hidden"
    besides = " besides the optimizer's state" if solution.graph.host_state_bytes else ""
    style.finish(axes, f"{copies_title(solution)}{besides} during the computation; {stalls}")
    axes.grid(visible=False)
    return axes


def _title(stream: Stream, is_wide: bool) -> str:
    size = f"{format_size(stream.size_bytes)}, " if is_wide and stream.size_bytes else ""
    return f"{stream.title}\n{size}{100 * stream.share:.0f} % busy"


def _draw_host(axes: Axes, found: Copies, most_bytes: int, s_per_unit: float) -> None:
    """Draw the bytes on the host into row 0, as a share of `most_bytes`."""
    held = found.host_bytes()
    if not held or not most_bytes:
        return
    edges = [at_s / s_per_unit for at_s, _ in held] + [found.end_s / s_per_unit]
    heights = [-HALF + 2 * HALF * n_bytes / most_bytes for _, n_bytes in held]
    axes.stairs(heights, edges, baseline=-HALF, fill=True, color=style.STONE, lw=0, zorder=2)


def _merge_close_events(events: Iterable[Event], least_s: float) -> list[tuple[float, float]]:
    """(start, end) of the events, merged where the gap between two is too short to be seen."""
    found: list[tuple[float, float]] = []
    for event in events:
        if found and event.start_s - found[-1][1] < least_s:
            found[-1] = found[-1][0], event.end_s
        else:
            found.append((event.start_s, event.end_s))
    return found
