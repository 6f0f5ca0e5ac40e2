"""The rows and tables of a report as text, shared by the terminal and the HTML page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphs.graph import Graph
from graphs.host_state import host_parameter_bytes, optimizer_of, state_copies_s
from graphs.passes import passes_of
from graphs.pipeline import pipeline_of
from solver.module_checkpointing.for_other_frameworks import Emitted
from solver.plan_analysis import TITLE_OF_STREAM, Curve, overhead_range
from solver.reporting.report_data import RESULTS, Report, Rewritten, freed_early_bytes, rewritten
from solver.schedule import Places, Simulation, Solution, reserved, reserved_by_setting
from solver.sizes_deadlines_progress import (
    Reader,
    counted,
    describe_op,
    format_both,
    format_percent,
    format_share,
    format_size,
    format_size_up,
    format_time,
)

N_SHOWN = 4
"""How many tensors at the bottleneck op, or differing values, are listed."""

Row = tuple[str, str]
"""A name and its value."""


@dataclass(frozen=True)
class Table:
    """A table of text cells.

    n_text: how many leading columns are text; the others are numbers, aligned right.
    bold: index of a row to print in bold (None: no row).
    spare: heads of columns to leave out on a narrow terminal, in this order.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_text: int = 1
    bold: int | None = None
    spare: tuple[str, ...] = ()

    def without(self, head: str) -> Table:
        """The table without the column of this head."""
        at = self.heads.index(head)
        rows = tuple(row[:at] + row[at + 1 :] for row in self.rows)
        spare = tuple(each for each in self.spare if each != head)
        return dataclasses.replace(
            self, heads=self.heads[:at] + self.heads[at + 1 :], rows=rows, spare=spare
        )


def step_name(graph: Graph) -> str:
    """The model and the device that it is planned for, as far as the graph records them."""
    costs = graph.meta.cost_model
    recorded = costs.get("title", costs.get("device")) if isinstance(costs, Mapping) else None
    device = recorded or graph.meta.device
    model = graph.meta.model or "one training step"
    return f"{model} on {device}" if device else model


def headline(solution: Solution) -> str:
    """Peak without and with the plan, and the overhead: "800.0 MB -> 600.0 MB, +2.65 %"."""
    before_bytes, plan = solution.baseline.peak_bytes, solution.simulation
    if plan is None:
        budget = format_size(solution.request.available_bytes)
        return f"{format_size(before_bytes)}, and no plan for {budget}: {solution.status}"
    return (
        f"{format_size(before_bytes)} -> {format_size(plan.peak_bytes)}, "
        f"{format_share(solution.overhead)}"
    )


def curve_text(curve: Curve) -> str:
    """How the curve's points were found, and down to which budget there are plans."""
    least_bytes, parts = curve.least_planned_bytes, []
    if curve.quick:
        parts.append(f"quick: {counted(len(curve.points), 'search', 'searches')} with less work")
    if least_bytes is not None:
        parts.append(f"plans down to {format_size_up(least_bytes)}")
    if curve.proven_bytes:
        parts.append(f"proven: none below {format_size(curve.proven_bytes)}")
    return "; ".join(parts)


def request_rows(report: Report) -> Iterator[Row]:
    """What was planned: graph, device, costs, budget, host and disk."""
    graph, request = report.best.plain, report.best.request
    if report.not_traced:
        yield "not traced", f"{report.not_traced}; planned by whole submodules, which may cost more"
    yield "graph", f"{counted(len(graph.nodes), 'op')}, {len(graph.forward_nodes)} of them forward"
    yield "device", report.device
    yield "costs", report.costs or "not recorded in the graph file"
    passes = passes_of(graph.meta.environment)
    if passes.n > 1:
        yield "passes", passes.words
    elif graph.n_in_flight > 1 or "pipeline" in graph.meta.environment:
        pipeline = pipeline_of(graph.meta.environment)
        words = "" if pipeline is None else f"{pipeline.words}; "
        in_flight = counted(graph.n_in_flight, "micro-batch", "micro-batches")
        yield "pipeline", f"{words}{in_flight} in flight"
    of_reserved = ", of reserved memory" if request.budget_of == "reserved" else ""
    yield "budget", format_both(request.budget_bytes) + of_reserved
    if request.reserve_bytes:
        reason = f" ({report.reserve_reason})" if report.reserve_reason else ""
        yield "reserve", f"{format_both(request.reserve_bytes)}{reason}"
        yield "available", f"{format_both(request.available_bytes)} after the reserve"
    places = request.places or Places()
    for name, place in (("host", places.host), ("disk", places.disk)):
        if place is not None:
            link = f"{format_size(place.link.out_bytes_per_s)}/s out"
            link += f", {format_size(place.link.in_bytes_per_s)}/s in"
            if place.link.latency_s:
                link += f", {format_time(place.link.latency_s)} for each copy"
            where = f", {places.disk_directory}" * (name == "disk" and bool(places.disk_directory))
            yield name, f"{format_both(place.capacity_bytes)}, {link}{where}"


def describe_host(places: Places) -> str:
    """Sizes and rates of host and disk in short; "" if there are none."""
    kinds = (("host memory", places.host), ("a disk", places.disk))
    return " and ".join(
        f"{format_size(place.capacity_bytes)} of {kind} at "
        + " and ".join(
            f"{format_size(rate)}/s"
            for rate in dict.fromkeys((place.link.out_bytes_per_s, place.link.in_bytes_per_s))
        )
        for kind, place in kinds
        if place is not None
    )


def answer_rows(report: Report) -> Iterator[Row]:
    """The best plan, or why there is none."""
    solution, simulation = report.best, report.best.simulation
    yield "method", solution.method
    if simulation is None:
        yield from _obstacle_rows(solution, report.reader)
    else:
        spare = solution.request.available_bytes - simulation.peak_bytes
        of_reserved = solution.request.budget_of == "reserved"
        to_spare = "" if of_reserved else f", {format_size(spare)} to spare"
        yield "peak", f"{format_both(simulation.peak_bytes)}{to_spare}"
        if solution.graph.n_in_flight > 1:
            one = "pass" if passes_of(solution.environment).n > 1 else "micro-batch"
            saved = f"{format_size(simulation.saved_bytes)} for backward per {one} in flight"
            yield "saved", f"{saved} (baseline: {format_size(solution.baseline.saved_bytes)})"
        yield from _reserved_rows(solution)
        yield from _early_free_rows(solution)
        if (changed := rewritten(solution)) is not None:
            yield "rewrites", _rewrite_text(solution, changed)
        baseline_time = format_time(solution.baseline.time_s)
        yield "step time", f"{format_time(simulation.time_s)} (baseline: {baseline_time})"
        yield "overhead", format_share(solution.overhead) + _range_text(solution)
    bound = solution.lower_bound_overhead
    if not math.isinf(bound):
        text = f"no schedule{_scope_text(solution)} within the budget is faster"
        yield "lower bound", f"{format_share(bound)}: {text}"
    if solution.gap is not None:
        yield "gap", f"{format_percent(solution.gap)} of the baseline step time"
    if simulation is not None:
        fits = solution.baseline.peak_bytes <= solution.request.available_bytes
        unneeded = "; the step fits without a plan" if fits else ""
        yield "recomputed ops", f"{simulation.n_recomputed}{unneeded}"
        yield from _state_rows(solution)
        yield from _copy_rows(solution, simulation)
    ended = "; the search stopped at its share of the time limit" if solution.timed_out else ""
    ended = "; the search was interrupted" if solution.interrupted else ended
    yield "solve time", format_time(solution.solve_time_s) + ended
    for what, path in report.files:
        yield what, str(path)
    if simulation is not None and not any(what == "schedule" for what, _ in report.files):
        yield "schedule", f"not saved; save it with {report.reader.saves}"


def _reserved_rows(solution: Solution) -> Iterator[Row]:
    """What PyTorch's allocator reserves on a card for the plan."""
    graph, schedule, request = solution.graph, solution.schedule, solution.request
    if schedule is None or not (reserved_bytes := reserved_by_setting(graph, schedule)):
        return
    with_segments = format_size(reserved_bytes["expandable_segments"])
    text = f"by PyTorch's allocator ({with_segments} with expandable_segments:True; simulated)"
    if request.budget_of == "reserved":
        at_capacity = reserved(graph, schedule, capacity_bytes=request.available_bytes)
        size = format_size(at_capacity.reserved_bytes)
        text += f"; {size} if the card has no more memory than is available"
    elif min(reserved_bytes.values()) > request.budget_bytes:
        text += "; above the budget, which limits what is allocated"
    yield "reserved", f"{format_both(reserved_bytes['default'])} {text}"


def _state_rows(solution: Solution) -> Iterator[Row]:
    """Where the optimizer's state and parameters are, if the plan may use a host, and the time that
    their copies take."""
    graph, name = solution.graph, "optimizer state"
    optimizer = optimizer_of(graph.meta.environment)
    if graph.host_state_bytes:
        share = format_share(state_copies_s(graph) / (solution.baseline.time_s or 1.0))
        parameters_bytes = host_parameter_bytes(graph)
        if not parameters_bytes:
            yield name, f"{format_both(graph.host_state_bytes)} on the host, {share} time"
            return
        yield name, f"{format_both(graph.host_state_bytes - parameters_bytes)} on the host"
        both = f"on the host, {share} time with the optimizer state"
        yield "parameters", f"{format_both(parameters_bytes)} {both}"
    elif solution.request.places is not None and (reason := optimizer.get("state_stays")):
        yield name, f"on the device: {reason}"


def _copy_rows(solution: Solution, simulation: Simulation) -> Iterator[Row]:
    """The copies to host and disk and their times, or a note that the plan copies nothing."""
    if not simulation.busy_s:
        if solution.request.places is not None:
            proven = solution.status == "optimal"
            what = "nothing else" if simulation.host_peak_bytes else "nothing"
            text = "copies would save no time" if proven else "copies were not found to save time"
            yield "on the host", f"{what}; {text}{' (proven)' if proven else ''}"
        return
    yield "on the host", format_both(simulation.host_peak_bytes)
    if simulation.disk_peak_bytes:
        yield "on the disk", format_both(simulation.disk_peak_bytes)
    elif solution.request.places is not None and solution.request.places.disk is not None:
        yield "on the disk", "nothing"
    busy = (
        f"{TITLE_OF_STREAM[stream]} {format_time(time_s)} "
        f"({format_percent(time_s / (simulation.time_s or 1.0), digits=1)} of the step)"
        for stream, time_s in simulation.busy_s.items()
    )
    besides = ", besides the optimizer's state" if solution.graph.host_state_bytes else ""
    hidden = f"{format_time(simulation.stall_s)} not hidden{besides}"
    yield "copies", f"{', '.join(busy)}; {hidden}"


def _range_text(solution: Solution) -> str:
    """The range of the overhead (`overhead_range`); "" if both ends print the same."""
    found = overhead_range(solution)
    if found is None:
        return ""
    least, largest = map(format_share, found)
    return "" if least == largest else f" ({least} to {largest}, by the rates that kernels reach)"


def _rewrite_text(solution: Solution, changed: Rewritten) -> str:
    """The rewrites of the plan, and what they save and cost without any recomputation."""
    parts = [name.replace("_", " ") for name in changed.names if not name.endswith("in_place")]
    if changed.n_in_place:
        parts.append(f"{counted(changed.n_in_place, 'output')} in place of inputs")
    if len(parts) == len(changed.saved_bytes) > 1:
        each = zip(parts, changed.saved_bytes, changed.overheads, strict=True)
        parts = [
            f"{part} ({_signed(saved)}{format_share(time)} time)" for part, saved, time in each
        ]
    results = RESULTS[changed.results]
    peak, plain = format_size(changed.peak_bytes), format_size(changed.plain_bytes)
    instead = f"{peak} instead of {plain}"
    if peak == plain:  # they save at other ops than the peak op; a plan may have its peak there
        instead = "the same peak (they save memory at other ops, where a plan may peak)"
    return (
        f"{', '.join(parts)}: without recomputation {instead}, "
        f"{format_share(changed.overhead)} time; {results}"
    )


def _signed(saved_bytes: int) -> str:
    sign = "-" if saved_bytes > 0 else "+"
    return f"{sign}{format_size(abs(saved_bytes))}, " if saved_bytes else ""


def _early_free_rows(solution: Solution) -> Iterator[Row]:
    """What a plan saves by freeing tensors early, before it recomputes or rewrites anything."""
    freed_bytes, eager_bytes = freed_early_bytes(solution), solution.baseline.peak_bytes
    freed, eager = format_size(freed_bytes), format_size(eager_bytes)
    if freed_bytes < eager_bytes and freed != eager:
        text = f"{freed} instead of {eager}, as tensors are freed after their last use"
        yield "early frees", f"{text}, without recomputation or rewrites"


def _scope_text(solution: Solution) -> str:
    """Limits a proof to whole submodules if the graph is not made of single operators, else ""."""
    return " of whole submodules" if solution.graph.meta.scope else ""


def _obstacle_rows(solution: Solution, reader: Reader) -> Iterator[Row]:
    """Why there is no schedule, which budget would be enough, and what the bottleneck op needs."""
    graph, request, obstacle = solution.graph, solution.request, solution.obstacle
    budget, scope = format_both(request.budget_bytes), _scope_text(solution)
    if solution.status == "time_limit":
        yield "result", f"nothing found within the time limit; {reader.longer}"
    elif solution.proven_infeasible:
        yield "result", f"no schedule{scope} fits {budget}"
    else:
        yield "result", f"method {solution.method} finds no schedule that fits {budget}"
    if obstacle is None:
        return
    if obstacle.cut_short:
        by, hint = "the time limit", f"; {reader.longer}"
        if solution.interrupted:
            by, hint = "Ctrl-C", ""
        text = f"{by} ended the search for the minimum budget: less may be enough"
        yield "cut short", f"{text}{hint}"
    if solution.minimum_budget_bytes is not None:
        minimum = format_size_up(solution.minimum_budget_bytes)
        of_what = "" if pipeline_of(graph.meta.environment) is None else " of this stage alone"
        found = f"the smallest at which {solution.method} found a plan{of_what}"
        yield "minimum budget", f"{minimum}, {found}"
    if proven_bytes := solution.proven_minimum_bytes:
        is_least = proven_bytes == solution.minimum_budget_bytes
        floor = "in less" if is_least else f"below {format_both(proven_bytes)}"
        yield "proven", f"no schedule{scope} fits {floor}"
    if solution.fits_without_plan:
        yield "however", solution.without_plan_text
    if (node := graph.node_by_name.get(obstacle.op)) is not None:
        yield "bottleneck op", describe_op(node)
        allocated = [(n, size) for n, size in obstacle.on_device if n in graph.producer]
        shown = [f"{name} {format_size(size)}" for name, size in allocated[:N_SHOWN]]
        if len(allocated) > N_SHOWN:
            rest = sum(size for _, size in allocated[N_SHOWN:])
            shown.append(f"{len(allocated) - N_SHOWN} more {format_size(rest)}")
        if node.workspace_bytes:
            shown.append(f"workspace {format_size(node.workspace_bytes)}")
        yield "requires", ", ".join([*shown, f"resident {format_size(graph.resident_bytes)}"])


def emitted_rows(report: Report, found: Emitted) -> Iterator[Row]:
    """The closest setting of another system, compared with this plan."""
    solution, simulation = report.best, found.simulation
    if not found.fits:
        budget = format_both(solution.request.available_bytes)
        yield "result", f"no setting of {found.title} fits {budget}; smallest peak:"
    yield "setting", found.setting or "default, no activation checkpointing"
    yield "peak", format_both(simulation.peak_bytes)
    yield "overhead", format_share(report.emitted_overhead)
    if solution.simulation is not None:
        peak = format_both(solution.simulation.peak_bytes)
        yield "this plan", f"{peak} at {format_share(solution.overhead)}"
    settings = counted(found.n_judged, "setting")
    text = f"{settings} for {counted(found.n_layers, 'layer')}, simulated on the same graph"
    yield "selected from", f"{text}; a forecast, as the other system runs its own kernels"
    if found.note:
        yield "note", found.note


def peak_and_overhead(solution: Solution) -> tuple[str, str]:
    """Peak and overhead as text; both "" without a plan."""
    run = solution.simulation
    return format_size(run.peak_bytes) if run else "", format_share(solution.overhead)


def method_table(report: Report) -> Table:
    """One row for each method of a comparison."""
    titles = ("peak", "overhead", "bound", "gap", "recomputed", "solve time")
    rows: list[tuple[str, ...]] = []
    for solution in report.solutions:
        run, gap, bound = solution.simulation, solution.gap, solution.lower_bound_overhead
        figures = (
            "" if math.isinf(bound) else format_share(bound),
            "" if gap is None else format_percent(gap),
            str(run.n_recomputed) if run else "",
            format_time(solution.solve_time_s),
        )
        rows.append((solution.method, solution.status, *peak_and_overhead(solution), *figures))
    rows += [(method, "refused", *[""] * len(titles)) for method, _ in report.refused]
    bold = report.solutions.index(report.best)
    spare = ("gap", "recomputed", "solve time")
    return Table(("method", "status", *titles), tuple(rows), n_text=2, bold=bold, spare=spare)
