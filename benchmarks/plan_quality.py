"""How good plans are, and how long they take: `auto` and other methods over graphs and budgets.

    python -m benchmarks.plan_quality --out benchmarks/results/plan_quality.json
        [--graphs gpt2,unet] [--shares 0.9,0.5] [--time-limit S]

A budget's share is its place between the least feasible budget known (0) and the peak of the step
without checkpointing (1). For each graph and share: `auto`'s schedule, its proven bound, and beside
it in the same run our other methods and what PyTorch's partitioner saves (`benchmarks.peers`).
Every figure is one of `solver.simulate`. The figures are written as JSON after each graph, so a run
that is stopped can be continued, and as a Markdown table beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks import harness, peers
from benchmarks.harness import Row, percent, table
from benchmarks.zoo.graphs import GRAPHS
from graphs.graph import Graph
from graphs.trace import CapturedStep
from solver.methods import METHODS, find_obstacle
from solver.schedule import Schedule, baseline, simulate

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
OTHERS = ("every_block", "sqrt", "dp")
PEERS_TIME_LIMIT_S = 120.0
"""For all of the partitioner's sets of one graph."""
TARGET_GAP = 0.001
"""Of the baseline's time, at shares of a half and more."""
TIGHT_TARGET_GAP = 0.01
"""Of the baseline's time, at smaller shares."""


def main() -> None:
    parser = harness.parser("plan_quality", __doc__, time_limit_s=60.0)
    parser.add_argument("--graphs", type=harness.names(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--shares", type=harness.shares, default=SHARES)
    arguments = parser.parse_args()
    report = harness.read(arguments.out, "graphs")
    report["circumstances"] = harness.circumstances(arguments.time_limit)
    for name in arguments.graphs:
        report["graphs"][name] = measure_graph(
            name, GRAPHS[name](), shares=arguments.shares, time_limit_s=arguments.time_limit
        )
        harness.write(arguments.out, report, markdown)
    if arguments.out is None:
        print(markdown(report))


def measure_graph(
    name: str, source: Graph | CapturedStep, *, shares: Sequence[float], time_limit_s: float
) -> Row:
    """All rows of one graph; printed to stderr as they come."""
    graph = source if isinstance(source, Graph) else source.graph
    began_s = time.perf_counter()
    least = find_obstacle(graph)
    least_s = time.perf_counter() - began_s
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    print(
        f"{name}: {len(graph.nodes)} ops, least {least.reached_bytes / 1e9:.3f} GB (proven "
        f"{least.proven_bytes / 1e9:.3f}) in {least_s:.1f} s",
        file=sys.stderr,
    )
    partitioned: peers.Simulations = {}
    if isinstance(source, CapturedStep):
        partitioned = peers.partitioned(source, time_limit_s=PEERS_TIME_LIMIT_S)
    rows = []
    for share in shares:
        budget_bytes = least.reached_bytes + int(share * (peak_bytes - least.reached_bytes))
        row = measure_budget(
            graph, budget_bytes, partitioned=partitioned, time_limit_s=time_limit_s
        )
        rows.append({"share": share, "budget_bytes": budget_bytes, **row})
        print(
            f"  {share:.1f}: {percent(row['overhead'])} bound {percent(row['bound'])} gap "
            f"{percent(row['gap'])} {row['seconds']:.1f} s"
            + (", time limit" if row["timed_out"] else ""),
            file=sys.stderr,
            flush=True,
        )
    return {
        "n_nodes": len(graph.nodes),
        "n_forward": len(graph.forward_nodes),
        "time_limit_s": time_limit_s,
        "least_proven_bytes": least.proven_bytes,
        "least_reached_bytes": least.reached_bytes,
        "least_s": least_s,
        "baseline_peak_bytes": peak_bytes,
        "rows": rows,
    }


def measure_budget(
    graph: Graph, budget_bytes: int, *, partitioned: peers.Simulations, time_limit_s: float
) -> Row:
    """auto's figures at one budget, and the overheads of the others."""
    options = {"budget_bytes": budget_bytes, "time_limit_s": time_limit_s, "seed": 0}
    began_s = time.perf_counter()
    proposal = METHODS["auto"](graph, **options)  # type: ignore[arg-type]
    seconds = time.perf_counter() - began_s
    bound = proposal.lower_bound_s / graph.baseline_time_s - 1.0
    peak_bytes, overhead = _simulated(graph, proposal.schedule)
    others = {
        method: _simulated(graph, METHODS[method](graph, **options).schedule)[1]  # type: ignore[arg-type]
        for method in OTHERS
    }
    others |= {
        name: peers.best_overhead(graph, found, budget_bytes=budget_bytes)
        for name, found in partitioned.items()
    }
    return {
        "peak_bytes": peak_bytes,
        "overhead": overhead,
        "bound": bound,
        "gap": None if overhead is None else max(0.0, overhead - bound),
        "seconds": seconds,
        "timed_out": proposal.timed_out,
        "others": others,
    }


def _simulated(graph: Graph, schedule: Schedule | None) -> tuple[int | None, float | None]:
    """Peak in bytes and overhead."""
    if schedule is None:
        return None, None
    simulation = simulate(graph, schedule)
    return simulation.peak_bytes, simulation.time_s / graph.baseline_time_s - 1.0


def missed(row: Row) -> bool:
    """Whether the gap is above the target for the row's share."""
    target = TARGET_GAP if row["share"] >= 0.5 else TIGHT_TARGET_GAP
    return row["gap"] is None or row["gap"] > target


def markdown(report: Row) -> str:
    """The tables: `auto` by graph and share, then every other method's overhead beside it."""
    shares = sorted(
        {r["share"] for g in report["graphs"].values() for r in g["rows"]}, reverse=True
    )
    rows, misses = [], []
    for name, found in report["graphs"].items():
        cells = {r["share"]: f"{percent(r['gap'])} ({r['seconds']:.1f} s)" for r in found["rows"]}
        rows.append([name, found["n_nodes"], *(cells.get(share, "") for share in shares)])
        misses += [
            f"{name} at {row['share']}: {percent(row['gap'])} ("
            f"{'time limit' if row['timed_out'] else 'work limits reached'})"
            for row in found["rows"]
            if missed(row)
        ]
    n_cells = sum(len(found["rows"]) for found in report["graphs"].values())
    aim = "0.1 points at shares of a half and more, 1 point below"
    parts = [
        "# Quality of plans",
        harness.ran(report, cpus="one used"),
        "Overhead, bound and gap are in percent of the step without checkpointing.",
        "## Gap and search time",
        table(["graph", "ops", *shares], rows),
        f"Above the target ({aim}): {len(misses)} of {n_cells}: {'; '.join(misses) or 'none'}.",
    ]
    for name, found in report["graphs"].items():
        parts += _details(name, found)
    return "\n\n".join(parts) + "\n"


def _details(name: str, found: Row) -> list[str]:
    """A graph's heading, its sizes, and a row for each share."""
    others = list(found["rows"][0]["others"])
    gb = {key: f"{size / 1e9:.3f} GB" for key, size in found.items() if key.endswith("_bytes")}
    rows = [
        [
            row["share"],
            f"{row['budget_bytes'] / 1e9:.3f}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.3f}",
            percent(row["bound"]),
            percent(row["overhead"]),
            *(percent(row["others"].get(other)) for other in others),
            f"{row['seconds']:.1f}",
        ]
        for row in found["rows"]
    ]
    sizes = (
        f"{found['n_nodes']} ops, {found['n_forward']} of them forward; least budget "
        f"{gb['least_reached_bytes']}, proven {gb['least_proven_bytes']} ({found['least_s']:.1f} "
        f"s); peak without checkpointing {gb['baseline_peak_bytes']}."
    )
    return [
        f"## {name}",
        sizes,
        table(["share", "budget GB", "peak GB", "bound", "auto", *others, "seconds"], rows),
    ]


if __name__ == "__main__":
    main()
