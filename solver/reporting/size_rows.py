"""The search for the largest batch size or sequence length, as rows and a table."""

from __future__ import annotations

from collections.abc import Iterator

from solver.plan_analysis import Candidate, SizeSearch
from solver.reporting.rows import Row, Table, peak_and_overhead
from solver.sizes_deadlines_progress import format_time

SIZE_TITLES = {"batch_size": "Batch sizes", "seq_length": "Sequence lengths"}
RATE_UNITS = {"batch_size": "samples/s", "seq_length": "positions/s"}


def size_table(search: SizeSearch) -> Table:
    """One row for each batch size or sequence length that was tried."""
    heads = ("size", "status", "peak", "overhead", "step time", RATE_UNITS[search.size])
    rows = []
    for candidate in search.candidates:
        solution, rate = candidate.solution, candidate.rate_per_s
        run = solution.simulation
        time = format_time(run.time_s) if run else ""
        speed = "" if rate is None else _rate(rate)
        rows.append(
            (str(candidate.size), solution.status, *peak_and_overhead(solution), time, speed)
        )
    largest = search.largest
    bold = None if largest is None else search.candidates.index(largest)
    return Table(heads, tuple(rows), n_text=2, bold=bold)


def size_rows(search: SizeSearch) -> Iterator[Row]:
    """The largest size that fits, and where throughput saturates."""
    largest, beyond, saturated = search.largest, search.beyond, search.saturation
    if largest is None:
        yield "largest", "none of the sizes tried fits"
        return
    limit = "" if beyond is None else f"; for {beyond.size} {misfit_text(beyond)}"
    between = beyond is not None and beyond.size > largest.size + 1
    limit += ". Sizes in between were not tried" if between else ""
    yield "largest", f"{largest.size}{limit}"
    if saturated is not None and saturated.rate_per_s and largest.rate_per_s:
        rate = f"{_rate(saturated.rate_per_s)} {RATE_UNITS[search.size]}"
        text = f"{saturation_text(search)}, {rate}"
        if saturated.size != largest.size:
            text += f"; {_rate(largest.rate_per_s)} at {largest.size}"
        yield "throughput", text


def _rate(per_s: float) -> str:
    """Format a rate with four digits: "0.1037", "21.15", "34,590"."""
    rounded = float(f"{per_s:.4g}")
    return f"{rounded:.4g}" if rounded < 1000 else f"{rounded:,.0f}"


def misfit_text(candidate: Candidate) -> str:
    """Why there is no plan for this size: a proof, the time limit, or the method found none."""
    solution = candidate.solution
    if solution.proven_infeasible:
        return "it is proven that no plan fits"
    if solution.status == "time_limit":
        return "none was found within the time limit"
    return f"{solution.method} found none"


def saturation_text(search: SizeSearch) -> str:
    """The size from which on throughput no longer grows. If that is the largest that fits, it may
    not be saturated, and the text says "highest". "" if nothing fits."""
    if search.saturation is None:
        return ""
    size = f"{'batch' if search.size == 'batch_size' else 'length'} {search.saturation.size}"
    if search.saturation == search.largest:
        return f"highest at {size}, the largest"
    return f"saturates at {size}"
