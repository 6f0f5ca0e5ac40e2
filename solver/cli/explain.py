"""`solve explain schedule.json graph.json`: a plan explained, to a person or as JSON."""

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

from graphs.files import FormatError
from graphs.graph import Node
from solver.analysis import (
    Peak,
    WhyRecomputed,
    most_recomputed,
    neighbours,
    peak,
    step_bytes_for,
    why_recomputed,
)
from solver.cli.arguments import Parser, UsageError, seconds
from solver.cli.progress import Progress
from solver.common import (
    counted,
    describe_op,
    format_both,
    format_percent,
    format_share,
    format_size,
    format_time,
    parse_size,
)
from solver.reporting import heading, pairs, part, print_plain
from solver.schedule import CATEGORIES, Solution

FORMAT = "explanation/1"
DEFAULT_TIME_LIMIT_S = 10.0
N_LARGEST = 6
N_AGAIN = 8


@dataclass(frozen=True)
class Explanation:
    """All that is told. step_bytes: between the neighbouring budgets. less, more: None: nothing is
    left to plan with, or Ctrl-C ended the search. op: the op that was asked for."""

    solution: Solution
    peak: Peak
    again: tuple[tuple[Node, int], ...]
    step_bytes: int
    less: Solution | None
    more: Solution | None
    op: WhyRecomputed | None


def main(argv: Sequence[str]) -> int:
    """Run `solve explain`; returns 0. Raises UsageError, BudgetError; FormatError."""
    given = _parser().parse_args(argv)
    solution = _loaded(given.schedule, given.graph)
    if given.op is not None and given.op not in solution.graph.node_by_name:
        near = difflib.get_close_matches(given.op, solution.graph.node_by_name, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise UsageError(f"--op {given.op}: the graph has no op of that name{hint}")
    step_bytes = step_bytes_for(solution)
    if given.step is not None:
        step_bytes = parse_size(given.step, what="step")
    less, more = None, None
    with (
        contextlib.suppress(KeyboardInterrupt),  # the rest of the answer is there without them
        Progress(quiet=False).says("planning for a little less and a little more"),
    ):
        less, more = neighbours(solution, step_bytes=step_bytes, time_limit_s=given.time_limit)
    found = Explanation(
        solution=solution,
        peak=peak(solution),
        again=most_recomputed(solution),
        step_bytes=step_bytes,
        less=less,
        more=more,
        op=None if given.op is None else why_recomputed(solution, given.op),
    )
    if given.json:
        print(json.dumps(to_json(found), indent=1, allow_nan=False))
    else:
        console = Console(highlight=False, emoji=False, markup=False)
        print_plain(Group(*_sections(found, f"{given.schedule} on {given.graph}")), console)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="solve explain",
        description="Why an op runs again, where the peak is, and what a budget's byte is worth.",
        allow_abbrev=False,
    )
    parser.add_argument("schedule", help="a schedule that -o wrote")
    parser.add_argument("graph", help="the graph it is for, as --graph-out wrote it")
    parser.add_argument("--op", metavar="NAME", help="the op to explain, by its name in the graph")
    parser.add_argument(
        "--step",
        metavar="SIZE",
        help="how much more and less to plan for (default: 1 GB, at most a tenth of what is not "
        "resident)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=DEFAULT_TIME_LIMIT_S,
        metavar="S",
        help="seconds for each of the two searches (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    return parser


def _loaded(schedule: str, graph: str) -> Solution:
    """Raises FormatError, whatever is wrong with the files."""
    for path in (schedule, graph):
        if not Path(path).is_file():
            raise FormatError(f"{path}: no such file; give schedule.json and graph.json")
    try:
        return Solution.load(schedule, graph=graph)
    except FormatError:
        raise
    except (ValueError, OSError) as error:  # an illegal schedule, or one of another graph
        raise FormatError(f"{schedule}: {error}") from error


def _sections(found: Explanation, name: str) -> Iterator[RenderableType]:
    solution = found.solution
    yield heading("Plan", name)
    yield pairs(_plan_rows(solution))
    yield heading("Peak")
    yield pairs(_peak_rows(found.peak))
    if found.again:
        yield heading("Run again")
        yield pairs(_again_rows(found))
    if found.op is not None:
        yield heading("Op", found.op.node.name)
        yield pairs(_op_rows(found.op, solution))
    yield heading("Budget", f"{format_both(found.step_bytes)} less, and more")
    yield pairs(_budget_rows(found))


def _plan_rows(solution: Solution) -> Iterator[tuple[str, str]]:
    assert solution.simulation is not None
    spare = solution.request.available_bytes - solution.simulation.peak_bytes
    yield "method", f"{solution.method}, {solution.status}"
    yield "budget", format_both(solution.request.budget_bytes)
    yield "peak", f"{format_both(solution.simulation.peak_bytes)}, {format_size(spare)} to spare"
    plain = format_size(solution.baseline.peak_bytes)
    yield "overhead", f"{format_share(solution.overhead)}; without checkpointing {plain}"


def _peak_rows(found: Peak) -> Iterator[tuple[str, str]]:
    yield "stands at", describe_op(found.node)
    yield "when", f"op {found.position} of {found.n_ops}"
    for name in CATEGORIES:
        size, share = part(name, found.memory_bytes)
        if found.memory_bytes[name]:
            yield name, f"{size}, {share}"
    for index, (root, size_bytes) in enumerate(found.largest[:N_LARGEST]):
        place = found.modules.get(root, "")
        where = f" of {place}" if place else ""
        yield ("largest" if index == 0 else ""), f"{root}{where}, {format_size(size_bytes)}"
    if len(found.largest) > N_LARGEST:
        rest_bytes = sum(size_bytes for _, size_bytes in found.largest[N_LARGEST:])
        yield "", f"{len(found.largest) - N_LARGEST} more, {format_size(rest_bytes)}"


def _again_rows(found: Explanation) -> Iterator[tuple[str, str]]:
    for node, n in found.again[:N_AGAIN]:
        times = "" if n == 1 else f"{n} times "
        yield format_time(node.time_s * n), f"{times}{describe_op(node)}"
    if len(found.again) > N_AGAIN:
        rest_s = math.fsum(node.time_s * n for node, n in found.again[N_AGAIN:])
        others = counted(len(found.again) - N_AGAIN, "other op")
        yield format_time(rest_s), f"{others}; --op NAME explains one"


def _op_rows(found: WhyRecomputed, solution: Solution) -> Iterator[tuple[str, str]]:
    baseline_s = solution.baseline.time_s or 1.0
    node = found.node
    yield "is", describe_op(node)
    size = format_size(found.output_bytes)
    yield "makes", f"{size} in {format_time(node.time_s)}"
    yield "runs", "once" if found.n_runs == 1 else f"{found.n_runs} times"
    for rerun in found.reruns:
        yield "dropped after", rerun.dropped_after.name
        if rerun.reader is None:
            yield "runs again", "for nothing that is computed later"
            continue
        through = " -> ".join(other.name for other in rerun.through)
        via = f", through {through}" if through else ""
        yield "runs again for", f"{describe_op(rerun.reader)}{via}"
    if found.n_runs == 1:
        yield "last read by", found.last_reader.name if found.last_reader else "no op"
        return
    lost_s = node.time_s * (found.n_runs - 1)
    yield "which costs", f"{format_time(lost_s)} a step, {format_share(lost_s / baseline_s)}"
    if found.kept is None:
        yield "kept instead", "it cannot be: a view of what it makes stands on the older copy"
        return
    saved_s = _time_s(solution) - found.kept.time_s
    over_bytes = found.kept.peak_bytes - solution.request.available_bytes
    verdict = (
        f"{format_size(over_bytes)} above the budget" if over_bytes > 0 else "within the budget"
    )
    more_bytes = found.kept.peak_bytes - _peak_bytes(solution)
    words = (
        f"the peak would be {format_both(found.kept.peak_bytes)}, {format_size(more_bytes)} more"
    )
    words += f" than it is: {verdict}; the step would take {format_time(saved_s)} less"
    yield "kept instead", words


def _budget_rows(found: Explanation) -> Iterator[tuple[str, str]]:
    for words, solution in (
        ("less", found.less),
        ("as it is", found.solution),
        ("more", found.more),
    ):
        if solution is None:
            yield words, "not planned"
            continue
        budget = format_size(solution.request.budget_bytes)
        if solution.overhead is None:
            proven = math.isinf(solution.lower_bound_s)
            nothing = "proven: nothing fits" if proven else "no schedule found"
            yield words, f"{budget}: {nothing}{_cut_short(solution)}"
            continue
        bound = format_share(solution.lower_bound_overhead)
        share = format_share(solution.overhead)
        yield words, f"{budget}: {share}, at least {bound} by proof{_cut_short(solution)}"
    yield "so", _worth(found)


def _cut_short(solution: Solution) -> str:
    """Of a search that the clock ended: the figures may differ from run to run."""
    return "; cut short by the time limit, another run may differ" if solution.timed_out else ""


def _worth(found: Explanation) -> str:
    step = format_size(found.step_bytes)
    here = found.solution.overhead or 0.0
    parts = []
    if found.less is not None and found.less.overhead is not None:
        parts.append(f"{step} less costs {format_percent(found.less.overhead - here)} of the step")
    else:
        parts.append(f"{step} less is out of reach")
    if found.more is not None and found.more.overhead is not None:
        parts.append(f"{step} more saves {format_percent(here - found.more.overhead)}")
    return ", ".join(parts)


def to_json(found: Explanation) -> dict[str, Any]:
    """The object of `--json`: sizes in bytes, times in seconds, null where there is nothing."""
    solution = found.solution
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
            for node, n in found.again
        ],
        "op": None if found.op is None else _op_json(found.op),
        "step_bytes": found.step_bytes,
        "budgets": [_budget_json(s) for s in (found.less, solution, found.more) if s is not None],
    }


def _op_json(found: WhyRecomputed) -> dict[str, Any]:
    kept = found.kept
    return {
        "node": found.node.name,
        "n_runs": found.n_runs,
        "output_bytes": found.output_bytes,
        "reruns": [
            {
                "dropped_after": rerun.dropped_after.name,
                "reader": None if rerun.reader is None else rerun.reader.name,
                "through": [node.name for node in rerun.through],
            }
            for rerun in found.reruns
        ],
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


def _time_s(solution: Solution) -> float:
    assert solution.simulation is not None
    return solution.simulation.time_s


def _peak_bytes(solution: Solution) -> int:
    assert solution.simulation is not None
    return solution.simulation.peak_bytes
