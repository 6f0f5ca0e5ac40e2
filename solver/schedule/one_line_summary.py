"""A finished plan summarised in one line."""

from __future__ import annotations

from solver.schedule.solution import Solution
from solver.sizes_deadlines_progress import format_share, format_size, format_time


def plan_line(
    solution: Solution, *, how: str = "planned", took_s: float | None = None, name: str = ""
) -> str:
    """ "GPT2: peak 11.32 GB -> 7.98 GB, time +0.03 % (bound +0.02 %), planned in 4.2 s"

    The two peaks are those without and with the plan. If nothing fits, the line gives the minimum
    budget instead.

    how: how the plan was made: "planned", "planned from an earlier plan".
    took_s: how long the caller has waited, tracing included (None: the solution's own time).
    name: the name of the step (default: the traced model's class).
    """
    name = name or solution.graph.meta.model or "graph"
    took = format_time(solution.solve_time_s if took_s is None else took_s)
    found = solution.simulation
    if found is None:
        searched = f"nothing fits {format_size(solution.request.budget_bytes)} ({solution.status})"
        return f"{name}: {searched}{solution.obstacle_text}; {took} in all"
    peaks = f"{format_size(solution.baseline.peak_bytes)} -> {format_size(found.peak_bytes)}"
    if found.host_peak_bytes:
        peaks += f" and {format_size(found.host_peak_bytes)} on the host"
    if found.disk_peak_bytes:
        peaks += f" and {format_size(found.disk_peak_bytes)} on the disk"
    if found.peak_bytes > solution.baseline.peak_bytes:
        peaks += " (more than without a plan, but within the budget)"
    bound = format_share(solution.lower_bound_overhead)
    ended = ""
    if solution.timed_out:
        limit = f"its share of the time limit of {format_time(solution.request.time_limit_s)}"
        ended = f"; the search stopped at {limit}, so a faster plan may exist"
    time = f"time {format_share(solution.overhead)} (bound {bound})"
    return f"{name}: peak {peaks}, {time}, {how} in {took}{ended}"
