"""How good plans are and how long they take, with and without rewrites: graphs x budgets.

    python -m benchmarks.plan_quality --out benchmarks/results/plan_quality.json
        [--graphs gpt2,unet] [--shares 0.9,0.5] [--time-limit S] [--before EARLIER.json]

A budget given as a share lies between the least feasible budget found (0) and the peak without
checkpointing (1). Both are those of the step without rewrites, so that plans with and without them
get the same bytes. For each graph and share, the report has the plan of `auto` and its proven
bound, and, for the step without rewrites, our other methods and PyTorch's partitioner
(`benchmarks.peers`). Every schedule is judged by `solver.simulate`. Search times are processor
seconds of one process, which other load does not change; the time limit is wall-clock time, and
generous. After each graph, the figures are written as JSON, so that a run that was stopped can be
continued, and as Markdown next to it.

--before compares with an earlier report: graphs that are in it get its budgets, the partitioner's
figures are taken from it if the step is the same, and results that became worse are listed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import harness, peers
from benchmarks.harness import Row, percent
from benchmarks.plan_quality_tables import markdown, worse_than
from benchmarks.zoo.graphs import GRAPHS, variants
from graphs.graph import Graph
from graphs.rewrites import Variants
from graphs.trace import CapturedStep
from solver.methods import METHODS, find_obstacle
from solver.schedule import Request, Simulation, baseline, simulate
from solver.solving import attempt

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
OTHER_METHODS = ("every_block", "sqrt", "dp")
PEERS_TIME_LIMIT_S = 120.0
"""For all sets of one graph that the partitioner chooses."""


def main() -> None:
    parser = harness.parser("plan_quality", __doc__, time_limit_s=600.0)
    parser.add_argument("--graphs", type=harness.names(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--shares", type=harness.shares, default=SHARES)
    parser.add_argument("--before", type=Path, help="a report (JSON) to compare with")
    arguments = parser.parse_args()
    before = json.loads(arguments.before.read_text())["graphs"] if arguments.before else {}

    def measured(name: str) -> Row:
        options = {"shares": arguments.shares, "time_limit_s": arguments.time_limit}
        return measure_graph(name, GRAPHS[name](), before=before.get(name), **options)

    each = harness.measure_each(arguments, "graphs", arguments.graphs, measured, markdown)
    for name, report in each:
        for worse in worse_than(before, report["graphs"], names=[name]):
            print(f"  worse than before: {worse}", file=sys.stderr, flush=True)


def measure_graph(
    name: str,
    source: Graph | CapturedStep,
    *,
    shares: Sequence[float],
    time_limit_s: float,
    before: Row | None = None,
) -> Row:
    """All figures of one graph; each result is printed to stderr when it is there.

    time_limit_s: wall-clock limit of the search in one variant of the step.
    before: the graph's part of an earlier report.
    """
    graph = source if isinstance(source, Graph) else source.graph
    ways = {"none": Variants.of(graph)}
    if isinstance(source, CapturedStep):
        ways["bitwise"] = variants(source)
    least = {way: least_budget(steps) for way, steps in ways.items()}
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    range_bytes = peak_bytes - least["none"]["reached_bytes"]
    if before is not None:  # the same range above what is resident, which may have grown since
        range_bytes = before["baseline_peak_bytes"] - before["range_from_bytes"]
    from_bytes = peak_bytes - range_bytes
    print(f"{name}: {len(graph.nodes)} ops, {peak_bytes=}, {from_bytes=}, {least}", file=sys.stderr)
    least_bytes = least["none"]["reached_bytes"]  # may have grown, too, if an operator needs more
    budgets = {s: max(from_bytes + int(s * range_bytes), least_bytes) for s in shares}
    others = _other_overheads(source, graph, budgets, before)
    rows = []
    for share, budget_bytes in budgets.items():
        row: Row = {"share": share, "budget_bytes": budget_bytes}
        for way, steps in ways.items():
            row[way] = search_figures(steps, budget_bytes, time_limit_s=time_limit_s)
            print(f"  {share:.1f} {way}: {_line(row[way])}", file=sys.stderr, flush=True)
        rows.append(row | {"others": others[share]})
    return {
        "n_nodes": len(graph.nodes),
        "n_forward": len(graph.forward_nodes),
        "time_limit_s": time_limit_s,
        "baseline_time_s": graph.baseline_time_s,
        "baseline_peak_bytes": peak_bytes,
        "range_from_bytes": from_bytes,
        "least": least,
        "rows": rows,
    }


def least_budget(steps: Variants) -> Row:
    """The least budget of any variant, as proven and as reached by a schedule, and the processor
    seconds of the search."""
    began_s = time.process_time()
    found = [find_obstacle(graph) for graph in steps.planned]
    return {
        "proven_bytes": min(each.proven_bytes for each in found),
        "reached_bytes": min(each.reached_bytes for each in found),
        "seconds": time.process_time() - began_s,
    }


def search_figures(steps: Variants, budget_bytes: int, *, time_limit_s: float) -> Row:
    """Plan with `auto`, as `solve` does, and report overhead, bound and gap as shares of the plain
    step's time.

    time_limit_s: wall-clock limit for one variant of the step.

    "overhead" is None if no plan was found, "bound" if there is a proof that nothing fits.
    """
    limit_s = time_limit_s * len(steps.planned)  # they share the time
    request = Request(budget_bytes, time_limit_s=limit_s)
    began_s = time.process_time()
    solution = attempt(steps, request)
    seconds = time.process_time() - began_s
    least_s = solution.lower_bound_s
    bound = None if math.isinf(least_s) else least_s / steps.plain.baseline_time_s - 1.0
    overhead = _overhead(steps.plain, solution.simulation)
    return {
        "peak_bytes": None if solution.simulation is None else solution.simulation.peak_bytes,
        "overhead": overhead,
        "bound": bound,
        "gap": None if overhead is None or bound is None else max(0.0, overhead - bound),
        "seconds": seconds,
        "timed_out": solution.timed_out,
        "rewrites": list(solution.graph.meta.rewrites),
    }


def _overhead(plain: Graph, simulation: Simulation | None) -> float | None:
    return None if simulation is None else simulation.time_s / plain.baseline_time_s - 1.0


def _line(cell: Row) -> str:
    late = ", time limit" if cell["timed_out"] else ""
    return (
        f"{percent(cell['overhead'])} bound {percent(cell['bound'])} gap {percent(cell['gap'])} "
        f"{cell['seconds']:.1f} s{late} {'+'.join(cell['rewrites'])}"
    )


def _other_overheads(
    source: Graph | CapturedStep, graph: Graph, budgets: Mapping[float, int], before: Row | None
) -> Mapping[float, Mapping[str, float | None]]:
    """Share of the budget -> overheads of our other methods and of the partitioner.

    The partitioner's overheads are taken from the earlier report if it is of the same step.
    """
    found = {
        share: _method_overheads(graph, budget_bytes) for share, budget_bytes in budgets.items()
    }
    if not isinstance(source, CapturedStep):
        return found
    if before is not None and before["n_nodes"] == len(graph.nodes):
        rows = {row["share"]: row["others"] for row in before["rows"]}
        if all(share in rows and _is_same_step(each, rows[share]) for share, each in found.items()):
            return {share: {**rows[share], **each} for share, each in found.items()}
    partitioned = peers.simulate_partitions(source, time_limit_s=PEERS_TIME_LIMIT_S)
    return {
        share: each
        | {
            name: peers.best_overhead(graph, sets, budget_bytes=budgets[share])
            for name, sets in partitioned.items()
        }
        for share, each in found.items()
    }


def _method_overheads(graph: Graph, budget_bytes: int) -> dict[str, float | None]:
    limits = {"budget_bytes": budget_bytes, "time_limit_s": 600.0, "seed": 0}
    schedules = {name: METHODS[name](graph, **limits).schedule for name in OTHER_METHODS}  # type: ignore[arg-type]
    return {
        name: None if schedule is None else _overhead(graph, simulate(graph, schedule))
        for name, schedule in schedules.items()
    }


def _is_same_step(now: Row, before: Row) -> bool:
    """Whether two reports are of the same step: `every_block`, which chooses nothing, agrees."""
    one, other = now["every_block"], before["every_block"]
    return one is other or math.isclose(one or 0.0, other or 0.0, abs_tol=1e-9)


if __name__ == "__main__":
    main()
