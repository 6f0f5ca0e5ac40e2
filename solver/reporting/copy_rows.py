"""The copies of a plan as rows and tables: streams, stalls, and storages on host and disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from graphs.host_state import host_parameter_bytes, state_copies_s
from solver.plan_analysis import Copies, Trip
from solver.reporting.rows import Row, Table
from solver.schedule import Solution
from solver.sizes_deadlines_progress import (
    counted,
    describe_op,
    format_percent,
    format_size,
    format_time,
)

N_TRIPS = 12
"""How many storages on the host are listed: the largest."""
N_STALLS = 4
"""How many stalls are listed: the longest."""
N_COLUMNS = 54
"""Columns of the timeline drawn in text."""
FILL_LETTERS = " .-+#"
"""Letters for how much of a column is filled: nothing, up to 1/4, up to 1/2, up to 3/4, more."""


def copies_title(solution: Solution) -> str:
    """The section's title, by where the plan copies to."""
    on_disk = solution.simulation is not None and solution.simulation.disk_peak_bytes
    return "Copies to the host and the disk" if on_disk else "Copies to the host"


def stream_table(found: Copies) -> Table:
    """One row for each stream that runs anything."""
    rows = tuple(
        (
            stream.title,
            str(stream.n_ops),
            format_size(stream.size_bytes) if stream.size_bytes else "",
            format_time(stream.busy_s),
            format_percent(stream.share, digits=1),
        )
        for stream in found.streams
    )
    return Table(("stream", "ops", "bytes", "busy", "of the step"), rows)


def stall_rows(found: Copies) -> Iterator[Row]:
    """How long the computation waits for copies in all, and the longest stalls."""
    if not found.stalls:
        yield "waiting", "never: all copies are hidden behind the computation"
        yield from _state_rows(found)
        return
    total_s = math.fsum(stall.time_s for stall in found.stalls)
    yield "waiting", f"{format_time(total_s)} in {counted(len(found.stalls), 'stall')}"
    for stall in sorted(found.stalls, key=lambda stall: -stall.time_s)[:N_STALLS]:
        when = f"{format_time(stall.time_s)} at {format_time(stall.start_s)}"
        waits = "the end of the step" if stall.node is None else describe_op(stall.node)
        yield "", f"{when}: {waits} waits for the copy of {stall.storage or 'a storage'}"
    yield from _state_rows(found)


def _state_rows(found: Copies) -> Iterator[Row]:
    """How much longer the step is by copies of optimizer state and parameters, which are part of
    the optimizer's nodes."""
    if found.graph.host_state_bytes:
        slower = format_time(state_copies_s(found.graph))
        if host_parameter_bytes(found.graph):
            what = "copies of parameters and of the optimizer's state make the step"
        else:
            what = "copies of the optimizer's state make its step"
        yield "", f"besides these, {what} {slower} longer"


def trip_table(found: Copies) -> Table:
    """The storages that are copied to the host, the largest first, and when."""
    rows = [
        (
            trip.storage,
            trip.maker.module,
            "" if trip.reader is None else trip.reader.name,
            format_size(trip.size_bytes),
            _span(trip.out_s) or "from the disk",
            _span(trip.back_s) or ("to the disk" if trip.to_disk_s else ""),
        )
        for trip in found.trips[:N_TRIPS]
    ]
    rest = found.trips[N_TRIPS:]
    if rest:
        size = format_size(sum(trip.size_bytes for trip in rest))
        rows.append((f"{len(rest)} more", "", "", size, "", ""))
    heads = ("copied", "module", "back for", "bytes", "out", "back")
    return Table(heads, tuple(rows), n_text=3)


def _span(span_s: tuple[float, float] | None) -> str:
    return "" if span_s is None else f"{format_time(span_s[0])} - {format_time(span_s[1])}"


def trip_rows(trips: Iterable[Trip]) -> Iterator[Row]:
    """When storages are copied out, held and copied back."""
    for trip in trips:
        if trip.out_s is not None:
            yield "copied out", f"{format_size(trip.size_bytes)}, {_during(trip.out_s)}"
        if trip.from_disk_s is not None:
            yield "from the disk", _during(trip.from_disk_s)
        yield "on the host", f"until {format_time(trip.until_s)}"
        if trip.to_disk_s is not None:
            yield "to the disk", _during(trip.to_disk_s)
        if trip.back_s is not None:
            reader = f", for {describe_op(trip.reader)}" if trip.reader else ""
            yield "copied back", f"{_during(trip.back_s)}{reader}"


def _during(span_s: tuple[float, float]) -> str:
    return f"in {format_time(span_s[1] - span_s[0])} from {format_time(span_s[0])} on"


def timeline_rows(found: Copies) -> Iterator[Row]:
    """The timeline of each stream, and the bytes on host and disk, drawn in N_COLUMNS letters."""
    edges_s = [found.end_s * column / N_COLUMNS for column in range(N_COLUMNS + 1)]
    for stream in found.streams:
        spans = [(e.start_s, e.end_s, 1.0) for e in found.events if e.stream == stream.name]
        yield stream.title, _draw_columns(spans, edges_s)
    yield "on the host", _draw_bytes(found.host_bytes(), edges_s)
    if any(stream.name == "spill" for stream in found.streams):
        yield "on the disk", _draw_bytes(found.disk_bytes(), edges_s)
    yield "", f"a column is {format_time(found.end_s / N_COLUMNS)}; # busy, or full, all of it"


def _draw_bytes(held: Sequence[tuple[float, int]], edges_s: list[float]) -> str:
    """Draw bytes over time, as a share of their maximum. held: (seconds, bytes from then on)."""
    most_bytes = max((size_bytes for _, size_bytes in held), default=0) or 1
    spans = pairwise([*held, (edges_s[-1], 0)])
    return _draw_columns(
        ((start_s, stop_s, n_bytes / most_bytes) for (start_s, n_bytes), (stop_s, _) in spans),
        edges_s,
    )


def _draw_columns(spans: Iterable[tuple[float, float, float]], edges_s: list[float]) -> str:
    """Draw how much of each column is filled. spans: (start, stop, weight); edges_s: the edges of
    the columns."""
    width_s = edges_s[1] or 1.0
    filled_s = [0.0] * (len(edges_s) - 1)
    for start_s, stop_s, weight in spans:
        first = min(len(filled_s) - 1, int(start_s / width_s))
        for column in range(first, len(filled_s)):
            if edges_s[column] >= stop_s:
                break
            inside_s = min(stop_s, edges_s[column + 1]) - max(start_s, edges_s[column])
            filled_s[column] += weight * max(0.0, inside_s)
    most = len(FILL_LETTERS) - 1
    return "".join(FILL_LETTERS[min(most, math.ceil(most * s / width_s - 1e-9))] for s in filled_s)
