"""`solve explain schedule.json graph.json`: explain a plan, as text or JSON."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType

from checkpoint_solver.cli.progress import Progress
from checkpoint_solver.cli.usage import Parser, UsageError, seconds
from graphs.files import FormatError
from graphs.graph import Node
from solver.plan_analysis import (
    Copies,
    Peak,
    WhyRecomputed,
    copies,
    most_recomputed,
    neighbours,
    peak,
    step_bytes_for,
    trips_of,
    why_recomputed,
)
from solver.reporting import copies_title, part, stall_rows, terminal, trip_rows
from solver.schedule import OPTIMAL_GAP, Solution
from solver.sizes_deadlines_progress import (
    counted,
    describe_op,
    format_both,
    format_percent,
    format_share,
    format_size,
    format_time,
    parse_size,
)

FORMAT = "explanation/1"
N_LARGEST = 6
N_RECOMPUTED = 8


@dataclass(frozen=True)
class Explanation:
    """What is explained about a plan.

    recomputed: ops with the number of their recomputations.
    step_bytes: how much smaller and larger than the plan's the other two budgets are.
    less, more: the plans for those budgets (None: nothing of the budget is left, or Ctrl-C ended
        the search).
    op: why the op given by --op is recomputed (None: no --op).
    """

    solution: Solution
    peak: Peak
    recomputed: tuple[tuple[Node, int], ...]
    step_bytes: int
    less: Solution | None
    more: Solution | None
    op: WhyRecomputed | None


def main(argv: Sequence[str]) -> int:
    """Run `solve explain`; returns 0. Raises UsageError, BudgetError; FormatError."""
    given = _parser().parse_args(argv)
    solution = _load_plan(given.schedule, given.graph)
    if given.op is not None and given.op not in solution.graph.node_by_name:
        near = difflib.get_close_matches(given.op, solution.graph.node_by_name, n=3)
        hint = (
            f"; did you mean {', '.join(near)}?" if near else "; leave out --op to see ops by name"
        )
        raise UsageError(f"--op {given.op}: no op of that name in the graph{hint}")
    step_bytes = step_bytes_for(solution)
    if given.step is not None:
        step_bytes = parse_size(given.step, what="step")
    less, more = None, None
    with (
        contextlib.suppress(KeyboardInterrupt),  # the rest of the answer does not need them
        Progress(quiet=False).showing("planning for smaller and larger budgets"),
    ):
        less, more = neighbours(solution, step_bytes=step_bytes, time_limit_s=given.time_limit)
    found = Explanation(
        solution,
        peak(solution),
        most_recomputed(solution),
        step_bytes,
        less,
        more,
        op=None if given.op is None else why_recomputed(solution, given.op),
    )
    if given.json:
        print(json.dumps(to_json(found), indent=1, allow_nan=False))
    else:
        console = Console(highlight=False, emoji=False, markup=False)
        terminal.print_plain(
            Group(*_sections(found, f"{given.schedule} on {given.graph}")), console
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="solve explain",
        description="Explain a plan: its peak, its recomputed ops, and the value of more memory.",
        allow_abbrev=False,
    )
    parser.add_argument("schedule", help="schedule written by -o")
    parser.add_argument("graph", help="graph it was made for, written by --graph-out")
    parser.add_argument("--op", metavar="NAME", help="op to explain, by its name in the graph")
    step = "how much smaller and larger budgets to plan for (default: 1 GB, at most a tenth "
    step += "of the non-resident memory)"
    parser.add_argument("--step", metavar="SIZE", help=step)
    limit = "seconds for each of the two searches (default: 10)"
    parser.add_argument("--time-limit", type=seconds, default=10.0, metavar="S", help=limit)
    as_json = "print one JSON object instead of the text"
    parser.add_argument("--json", action="store_true", help=as_json)
    return parser


def _load_plan(schedule: str, graph: str) -> Solution:
    """Read the two files. Raises FormatError for every kind of invalid file."""
    for path in (schedule, graph):
        if not Path(path).is_file():
            raise FormatError(f"{path}: no such file; schedule.json and graph.json are expected")
    try:
        return Solution.load(schedule, graph=graph)
    except FormatError:
        raise
    except (ValueError, OSError) as error:  # an illegal schedule, or one of another graph
        text = str(error).removeprefix(f"{schedule}: ")  # some name the file themselves
        raise FormatError(f"{schedule}: {text}") from error


def _sections(found: Explanation, name: str) -> Iterator[RenderableType]:
    solution = found.solution
    yield from (terminal.heading("Plan", name), terminal.pairs(_plan_rows(solution)))
    yield from (terminal.heading("Peak"), terminal.pairs(_peak_rows(found.peak)))
    if found.recomputed:
        yield from (terminal.heading("Recomputed"), terminal.pairs(_recomputed_rows(found)))
    if (found_copies := copies(solution)) is not None:
        yield terminal.heading(copies_title(solution))
        yield terminal.pairs(_copy_rows(found_copies, solution))
    if found.op is not None:
        yield from (
            terminal.heading("Op", found.op.node.name),
            terminal.pairs(_op_rows(found.op, solution)),
        )
    step = f"with {format_both(found.step_bytes)} less or more"
    yield from (terminal.heading("Budget", step), terminal.pairs(_budget_rows(found)))


def _plan_rows(solution: Solution) -> Iterator[tuple[str, str]]:
    assert solution.simulation is not None
    spare = solution.request.available_bytes - solution.simulation.peak_bytes
    yield "method", f"{solution.method}, {solution.status}"
    yield "budget", format_both(solution.request.budget_bytes)
    yield "peak", f"{format_both(solution.simulation.peak_bytes)}, {format_size(spare)} to spare"
    yield "baseline peak", format_both(solution.baseline.peak_bytes)
    yield "overhead", format_share(solution.overhead)


def _peak_rows(found: Peak) -> Iterator[tuple[str, str]]:
    yield "peak op", describe_op(found.node)
    yield "position", f"op {found.position} of {found.n_ops}"
    total_bytes = sum(found.memory_bytes.values())
    for name, size_bytes in found.memory_bytes.items():
        if size_bytes:
            yield name, ", ".join(part(size_bytes, total_bytes))
    for index, (root, size_bytes) in enumerate(found.largest[:N_LARGEST]):
        module = f" in {found.modules[root]}" if found.modules.get(root) else ""
        yield "" if index else "largest tensors", f"{root}{module}, {format_size(size_bytes)}"
    if len(found.largest) > N_LARGEST:
        rest_bytes = sum(size_bytes for _, size_bytes in found.largest[N_LARGEST:])
        yield "", f"{len(found.largest) - N_LARGEST} more, {format_size(rest_bytes)}"


def _copy_rows(found: Copies, solution: Solution) -> Iterator[tuple[str, str]]:
    """Rows for host and disk peaks, the copy streams, stalls, and the largest copies."""
    assert solution.simulation is not None
    yield "on the host", f"at most {format_both(solution.simulation.host_peak_bytes)}"
    if solution.simulation.disk_peak_bytes:
        yield "on the disk", f"at most {format_both(solution.simulation.disk_peak_bytes)}"
    for stream in found.streams[1:]:
        share = format_percent(stream.share, digits=1)
        size = f"{format_size(stream.size_bytes)} in {counted(stream.n_ops, 'copy', 'copies')}"
        yield stream.title, f"{size}, {format_time(stream.busy_s)}, {share} of the step"
    yield from stall_rows(found)
    for index, trip in enumerate(found.trips[:N_LARGEST]):
        back = f", back for {trip.reader.name}" if trip.reader else ""
        text = f"{format_size(trip.size_bytes)}: {describe_op(trip.maker)}{back}"
        yield "" if index else "largest copies", text
    if len(found.trips) > N_LARGEST:
        rest_bytes = sum(trip.size_bytes for trip in found.trips[N_LARGEST:])
        more = f"{len(found.trips) - N_LARGEST} more, {format_size(rest_bytes)}"
        yield "", f"{more}; --op NAME explains one"


def _recomputed_rows(found: Explanation) -> Iterator[tuple[str, str]]:
    for node, n in found.recomputed[:N_RECOMPUTED]:
        times = "" if n == 1 else f"{n} times "
        yield format_time(node.time_s * n), f"{times}{describe_op(node)}"
    rest = found.recomputed[N_RECOMPUTED:]
    if rest:
        rest_s = math.fsum(node.time_s * n for node, n in rest)
        yield format_time(rest_s), f"{counted(len(rest), 'other op')}; --op NAME explains one"


def _op_rows(found: WhyRecomputed, solution: Solution) -> Iterator[tuple[str, str]]:
    assert solution.simulation is not None
    node, n_recomputed = found.node, found.n_runs - 1
    yield "op", describe_op(node)
    yield "output", f"{format_size(found.output_bytes)} in {format_time(node.time_s)}"
    yield "computed", "once" if n_recomputed == 0 else f"{found.n_runs} times"
    for recomputation in found.recomputations:
        yield "dropped after", recomputation.dropped_after.name
        if recomputation.reader is None:
            yield "recomputed for", "no later op"
            continue
        path = " -> ".join(other.name for other in recomputation.through)
        via = f", through {path}" if path else ""
        yield "recomputed for", f"{describe_op(recomputation.reader)}{via}"
    yield from trip_rows(trips_of(solution, node.outputs))
    if n_recomputed == 0:
        yield "last read by", found.last_reader.name if found.last_reader else "no op"
        return
    cost_s = node.time_s * n_recomputed
    share = format_share(cost_s / (solution.baseline.time_s or 1.0))
    yield "cost", f"{format_time(cost_s)} per step, {share}"
    if solution.schedule is not None and solution.schedule.has_copies:
        yield "if saved", "not worked out for a plan with copies to the host"
        return
    if found.kept is None:
        yield "if saved", "not possible: a view of its output reads the first copy"
        return
    excess_bytes = found.kept.peak_bytes - solution.request.available_bytes
    more_bytes = found.kept.peak_bytes - solution.simulation.peak_bytes
    saved_s = solution.simulation.time_s - found.kept.time_s
    fit = f"{format_size(excess_bytes)} above the budget"
    if excess_bytes <= 0:
        fit = f"within the budget (the search ends {format_percent(OPTIMAL_GAP)} above the bound)"
    text = f"peak {format_both(found.kept.peak_bytes)}, {format_size(more_bytes)} more, {fit}"
    yield "if saved", f"{text}; {format_time(saved_s)} less per step"


def _budget_rows(found: Explanation) -> Iterator[tuple[str, str]]:
    answers = {"less": found.less, "this plan": found.solution, "more": found.more}
    for name, solution in answers.items():
        if solution is None:
            yield name, "not planned"
            continue
        proven = math.isinf(solution.lower_bound_s)
        result = "proven infeasible" if proven else "no schedule found"
        if solution.overhead is not None:
            bound = format_share(solution.lower_bound_overhead)
            result = f"{format_share(solution.overhead)} (lower bound {bound})"
        if solution.timed_out:
            limit = format_time(solution.request.time_limit_s)
            result += f"; ended by the time limit of {limit}, results may vary"
        result += "; interrupted" if solution.interrupted else ""
        yield name, f"{format_size(solution.request.budget_bytes)}: {result}"
    step, overhead = format_size(found.step_bytes), found.solution.overhead or 0.0
    value = f"{step} less is infeasible"
    if found.less is not None and found.less.overhead is not None:
        value = (
            f"{step} less costs {format_percent(found.less.overhead - overhead)} of the step time"
        )
    if found.more is not None and found.more.overhead is not None:
        value += f"; {step} more saves {format_percent(overhead - found.more.overhead)}"
    yield "value of memory", value


def to_json(found: Explanation) -> dict[str, Any]:
    """The object that `--json` prints: sizes in bytes, times in seconds, null if not found."""
    solution = found.solution
    found_copies = copies(solution)
    return {
        "format": FORMAT,
        "graph_id": solution.graph.graph_id,
        "budget_bytes": solution.request.budget_bytes,
        "peak": {
            "op": None if found.peak.node is None else found.peak.node.name,
            "memory_bytes": found.peak.memory_bytes,
            "on_device": [{"tensor": n, "size_bytes": s} for n, s in found.peak.largest],
            "resident_bytes": found.peak.resident_bytes,
        },
        "again": [
            {"node": node.name, "n_recomputed": n, "time_s": n * node.time_s}
            for node, n in found.recomputed
        ],
        "copies": [
            {
                "storage": trip.storage,
                "size_bytes": trip.size_bytes,
                "out_s": trip.out_s,
                "back_s": trip.back_s,
                "reader": None if trip.reader is None else trip.reader.name,
            }
            for trip in (found_copies.trips if found_copies else ())
        ],
        "op": None if found.op is None else _op_json(found.op),
        "step_bytes": found.step_bytes,
        "budgets": [_budget_json(s) for s in (found.less, solution, found.more) if s is not None],
    }


def _op_json(found: WhyRecomputed) -> dict[str, Any]:
    kept = found.kept
    reruns = [
        {
            "dropped_after": each.dropped_after.name,
            "reader": None if each.reader is None else each.reader.name,
            "through": [node.name for node in each.through],
        }
        for each in found.recomputations
    ]
    return {
        "node": found.node.name,
        "n_runs": found.n_runs,
        "output_bytes": found.output_bytes,
        "reruns": reruns,
        "kept": None if kept is None else {"peak_bytes": kept.peak_bytes, "time_s": kept.time_s},
    }


def _budget_json(solution: Solution) -> dict[str, Any]:
    bound = solution.lower_bound_overhead
    return {
        "budget_bytes": solution.request.budget_bytes,
        "overhead": solution.overhead,
        "lower_bound_overhead": bound if math.isfinite(bound) else None,
        "cut_short": solution.timed_out,
    }
