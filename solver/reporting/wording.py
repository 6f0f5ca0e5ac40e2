"""The report in words and figures: rows of a name and a value, for the terminal and for the page.

Nothing is computed here that the judge has not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphs.graph import Graph
from solver.analysis import Candidate, SizeSearch
from solver.common import (
    counted,
    describe_op,
    format_both,
    format_percent,
    format_share,
    format_size,
    format_time,
)
from solver.emit import Emitted
from solver.reporting.rows import Report, emitted_overhead
from solver.runtime_hooks import Verification
from solver.schedule import Obstacle, Solution, baseline, memory_at, node_at

N_SHOWN = 4
"""How many of the tensors that stand in the way, or of the values that differ, are named."""


def asked(report: Report) -> Iterator[tuple[str, str]]:
    """What was to be planned, for what and within what: name and value of each row."""
    graph, request = report.best.graph, report.best.request
    n_forward = len(graph.forward_nodes)
    yield "graph", f"{counted(len(graph.nodes), 'op')}, {n_forward} of them forward"
    yield "device", report.device
    yield "costs", report.costs or "the graph file does not say"
    yield "budget", format_both(request.budget_bytes)
    if request.reserve_bytes:
        why = f", {report.reserve_reason}" if report.reserve_reason else ""
        yield "reserve", f"{format_both(request.reserve_bytes)}{why}"
        yield "to plan with", format_both(request.available_bytes)


def memory_parts(solution: Solution) -> tuple[dict[str, int], dict[str, int] | None]:
    """The breakdown at the peak without the plan and, where that differs, with it."""
    before = memory_at(solution.graph, baseline(solution.graph), solution.baseline.peak_op)
    if solution.schedule is None or solution.simulation is None or not _differs(solution):
        return before, None
    return before, memory_at(solution.graph, solution.schedule, solution.simulation.peak_op)


def _differs(solution: Solution) -> bool:
    """Whether the plan does anything: a plan that recomputes nothing is the step as it is."""
    return solution.simulation is not None and (
        solution.simulation.n_recomputed > 0
        or solution.simulation.peak_bytes != solution.baseline.peak_bytes
    )


def part(name: str, parts: dict[str, int]) -> tuple[str, str]:
    """Size and share of one category of a breakdown."""
    share = parts[name] / (sum(parts.values()) or 1)
    return format_size(parts[name]), format_percent(share, digits=1) if parts[name] else ""


def peaks(solution: Solution) -> Iterator[tuple[str, str]]:
    """Where the peak stands, without the plan and with it."""
    graph = solution.graph
    yield (
        "peak without",
        f"stands at {describe_op(node_at(graph, baseline(graph), solution.baseline))}",
    )
    if solution.schedule is not None and solution.simulation is not None and _differs(solution):
        node = node_at(graph, solution.schedule, solution.simulation)
        yield "peak with", f"stands at {describe_op(node)}"


def answered(report: Report) -> Iterator[tuple[str, str]]:
    """The best answer, or why there is none: name and value of each row."""
    solution = report.best
    yield "method", solution.method
    if solution.simulation is None:
        yield from _nothing(solution)
    else:
        spare = solution.request.available_bytes - solution.simulation.peak_bytes
        yield (
            "peak",
            f"{format_both(solution.simulation.peak_bytes)}, {format_size(spare)} to spare",
        )
        times = (
            f"{format_time(solution.simulation.time_s)}, {format_time(solution.baseline.time_s)}"
        )
        yield "time of a step", f"{times} without checkpointing"
        yield "overhead", format_share(solution.overhead)
    bound = solution.lower_bound_overhead
    if not math.isinf(bound):
        what = _what_is_planned(solution)
        yield "lower bound", f"{format_share(bound)}: no schedule{what} within the budget is faster"
    if solution.gap is not None:
        yield "gap", f"{format_percent(solution.gap)} of the step"
    if solution.simulation is not None:
        yield "ops run again", str(solution.simulation.n_recomputed)
    ended = "; the time limit ended the search" if solution.timed_out else ""
    yield "planned in", format_time(solution.solve_time_s) + ended
    for what, path in report.files:
        yield what, str(path)
    if solution.simulation is not None and not any(what == "schedule" for what, _ in report.files):
        yield "schedule", f"not written; {report.how_to_save} writes it"


def emitted(report: Report, found: Emitted) -> Iterator[tuple[str, str]]:
    """Another system's nearest setting beside this plan: name and value of each row."""
    answer, simulation = report.best, found.setting.simulation
    nothing = "the default: no activation checkpointing"
    if not found.fits:
        budget = format_both(answer.request.available_bytes)
        yield "none fits", f"no setting of {found.title} fits {budget}; the least peak has:"
    yield "setting", found.setting.text or nothing
    yield "its peak", format_both(simulation.peak_bytes)
    yield "its overhead", format_share(emitted_overhead(report, found))
    if answer.simulation is not None:
        ours = f"{format_both(answer.simulation.peak_bytes)} at {format_share(answer.overhead)}"
        yield "this plan", ours
    judged = (
        f"of {counted(found.n_judged, 'setting')} for {counted(found.n_layers, 'layer')}, by the "
        "same simulator"
    )
    yield "chosen", f"{judged} on the same graph; a forecast, as that system runs its own kernels"
    if found.note:
        yield "about it", found.note


def _what_is_planned(solution: Solution) -> str:
    """What a proof is about, where it is not about every operator by itself."""
    return " of whole submodules" if solution.graph.meta.scope else ""


def _nothing(solution: Solution) -> Iterator[tuple[str, str]]:
    """Why there is no schedule, and what would be enough."""
    asked, obstacle = solution.request, solution.obstacle
    if solution.status == "time_limit":
        yield "result", "nothing found within the time limit; --time-limit gives it longer"
    elif solution.proven_infeasible:
        what = _what_is_planned(solution) or " whatever"
        yield "result", f"no schedule{what} fits {format_both(asked.budget_bytes)}"
    else:
        yield "result", f"no schedule of this method fits {format_both(asked.budget_bytes)}"
    if obstacle is None:
        return
    if obstacle.cut_short:
        words = "the time limit ended the search for what follows; --time-limit gives it longer"
        yield "cut short", f"{words}, and less may be enough"
    least = solution.minimum_budget_bytes
    if least is not None:
        words = f"is the least for which method {solution.method} found a schedule"
        yield "least budget", f"{format_both(least)} {words}"
    if obstacle.proven_bytes:
        floor = format_both(obstacle.proven_bytes + asked.reserve_bytes)
        what = _what_is_planned(solution)
        yield (
            "proven",
            f"no schedule{what} fits below {floor}" if what else f"nothing fits below {floor}",
        )
    if obstacle.op in solution.graph.node_by_name:
        yield "in the way", describe_op(solution.graph.node_by_name[obstacle.op])
        yield "which needs", _needed(solution.graph, obstacle)


def _needed(graph: Graph, obstacle: Obstacle) -> str:
    """The largest tensors at the op in the way, resident ones in one figure."""
    made = [(n, size) for n, size in obstacle.on_device if n in graph.producer]
    shown = [f"{name} {format_size(size)}" for name, size in made[:N_SHOWN]]
    if len(made) > N_SHOWN:
        rest = sum(size for _, size in made[N_SHOWN:])
        shown.append(f"{len(made) - N_SHOWN} more {format_size(rest)}")
    shown.append(f"resident {format_size(graph.resident_bytes)}")
    return ", ".join(shown)


SIZE_TITLES = {"batch_size": "Batch sizes", "seq_length": "Sequence lengths"}


RATE_TITLES = {"batch_size": "samples/s", "seq_length": "positions/s"}


def size_heads(search: SizeSearch) -> tuple[str, ...]:
    """The titles of the columns of `size_row`."""
    return "size", "status", "peak", "overhead", "time of a step", RATE_TITLES[search.size]


def size_row(candidate: Candidate) -> tuple[str, ...]:
    """One size's row."""
    solution, rate = candidate.solution, candidate.rate_per_s
    simulation = solution.simulation
    return (
        str(candidate.size),
        solution.status,
        "" if simulation is None else format_size(simulation.peak_bytes),
        format_share(solution.overhead),
        "" if simulation is None else format_time(simulation.time_s),
        "" if rate is None else f"{rate:.4g}",
    )


def size_words(search: SizeSearch) -> Iterator[tuple[str, str]]:
    """The largest that fits, and where more stops paying."""
    found, beyond, pays = search.largest, search.beyond, search.pays_until
    if found is None:
        yield "largest", "none that was tried fits"
        return
    next_words = ""
    if beyond is not None and beyond.solution.status == "infeasible":
        next_words = f"; {beyond.size} has no plan within the budget"
    elif beyond is not None:
        next_words = f"; for {beyond.size} none was found within the time limit"
    yield "largest", f"{found.size}{next_words}"
    if pays is not None and pays.rate_per_s is not None and found.rate_per_s is not None:
        unit = RATE_TITLES[search.size]
        words = f"{pays.size}: {pays.rate_per_s:.4g} {unit}"
        if pays.size != found.size:
            words += f"; {found.size} gives {found.rate_per_s:.4g}"
        yield "more pays until", words


def compared(solution: Solution) -> tuple[str, ...]:
    """One method's row: method, status, peak, overhead, bound, gap, ops again, planned in."""
    simulation, bound = solution.simulation, solution.lower_bound_overhead
    return (
        solution.method,
        solution.status,
        "" if simulation is None else format_size(simulation.peak_bytes),
        format_share(solution.overhead),
        "" if math.isinf(bound) else format_share(bound),
        "" if solution.gap is None else format_percent(solution.gap),
        "" if simulation is None else str(simulation.n_recomputed),
        format_time(solution.solve_time_s),
    )


def measured_peaks(found: Verification) -> tuple[int, ...]:
    """Bytes: of the plan predicted and measured, of the step without it predicted and measured."""
    return (
        found.predicted_peak_bytes,
        found.measured_peak_bytes,
        found.baseline_predicted_peak_bytes,
        found.baseline_measured_peak_bytes,
    )


def measured_times(found: Verification) -> tuple[float, ...]:
    """Seconds, in the order of `measured_peaks`."""
    return (
        found.predicted_time_s,
        found.measured_time_s,
        found.baseline_predicted_time_s,
        found.baseline_measured_time_s,
    )


def verified(found: Verification) -> Iterator[tuple[str, str]]:
    """What running the step said beside the figures."""
    yield "ran on", found.device
    spread = format_time(found.spread_s)
    steps = f"medians of {counted(found.n_timed_steps, 'step')}, up to {spread} apart"
    yield "times", f"{steps}; other load on the machine shows in them"
    if found.fits:
        yield "budget", f"kept: at most {format_both(found.available_bytes)} was to be used"
    else:
        over = found.measured_peak_bytes - found.available_bytes
        yield "budget", f"OVERRUN by {format_both(over)}"
    if found.reserved_bytes is not None:
        beside = found.context_bytes
        words = "" if beside is None else f"; beside it {format_size(beside)} of the card are taken"
        yield "allocator took", f"{format_both(found.reserved_bytes)}{words}"
    if not found.differences:
        count = counted(found.n_gradients, "gradient")
        yield "bits", f"loss, {count} and buffers are the same, bit for bit, as without the plan"
        return
    for difference in found.differences[:N_SHOWN]:
        yield "DIFFERS", difference
    if len(found.differences) > N_SHOWN:
        yield "", f"and {len(found.differences) - N_SHOWN} more"
