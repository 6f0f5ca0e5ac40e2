"""Compare recomputation, copies to the host, and both: overhead, proven bound and search time.

    python -m benchmarks.offload --out benchmarks/results/offload.json
        [--graphs gpt2,unet] [--shares 0.5,0.3] [--time-limit S]

Graphs and shares of budgets are those of `benchmarks.plan_quality` (the step without rewrites, an
H100's roofline). The host's memory is unlimited. "offload" is the plain step without recomputation:
what exceeds the budget is copied to the host, the longest gaps between two uses first. Search times
are processor seconds of one process. The figures are written after each graph.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import Row, percent, table
from benchmarks.zoo.graphs import GRAPHS
from graphs.graph import Graph
from solver.bound import StorageGraph
from solver.methods import METHODS, find_obstacle
from solver.methods.auto.copy_placement import place_copies
from solver.methods.auto.with_copies import gaps_to_offload
from solver.schedule import Link, Place, Places, Schedule, baseline, simulate

DEFAULT_GRAPHS = ["gpt2-instance", "gpt2", "llama-4", "llama-32", "resnet50", "unet"]
SHARES = (0.7, 0.5, 0.3, 0.2, 0.1)
LINKS_GB_PER_S = (25, 50, 450)
"""The rates of PCI Express 4, PCI Express 5 and NVLink-C2C."""
HOST_BYTES = 10**13
MAX_OVERHEAD = 0.2
CONV_NETS = ("resnet50", "unet")
TARGET, TARGET_OF_NETS, TARGET_OF_TIGHT_NETS = 0.001, 0.005, 0.03
TIGHT_SHARE = 0.1
"""Target gaps, as shares of the step's time: for language models, for convolutional networks, and
for convolutional networks at budgets of TIGHT_SHARE and below."""
LEGEND = """\
Overhead in % of the step, proven bound / found; s: processor seconds of the search. Targets: a gap
of at most 0.1 points, for resnet50 and unet 0.5 at shares of 0.2 and more and 3 at 0.1; a search of
at most twice recomputation alone and 2 s.
"""
PUBLISHED = (
    (
        (
            "[POFO](https://papers.nips.cc/paper/2021/hash/c8461bf13fca8a2b9912ab2eb1668e4b-Abstract.html)"
            " (Beaumont, Eyraud-Dubois, Shilova 2021)"
        ),
        (
            "one third of the overhead of rematerialization removed; activations take 4 to 6 times "
            "less at less than 20 % overhead"
        ),
    ),
    (
        "[OffMate](https://hal.science/hal-04660745) (Zhao et al. 2024)",
        (
            "language models, with weights and optimizer on the CPU: up to 10 times less memory of "
            "the GPU at 10 to 50 % overhead"
        ),
    ),
)
"""What the authors report in their abstracts."""
ABOUT_GAINS = """\
The same for the table above. Removed: of the overhead of recomputation alone, the mean over the
shares of the budget. Activations: how many times less memory there is beside what is resident than
without a plan, at the least of these budgets with an overhead below 20 %. Parameters and optimizer
state stay on the device, and times are predicted by an H100's rates. Models and devices differ from
those of the papers.
"""


def main() -> None:
    parser = harness.parser("offload", __doc__, time_limit_s=600.0)
    parser.add_argument("--graphs", type=harness.names(GRAPHS), default=DEFAULT_GRAPHS)
    parser.add_argument("--shares", type=harness.shares, default=SHARES)
    arguments = parser.parse_args()

    def measured_graph(name: str) -> Row:
        source = GRAPHS[name]()
        graph = source if isinstance(source, Graph) else source.graph
        options = {"shares": arguments.shares, "time_limit_s": arguments.time_limit}
        return measure_graph(name, graph, **options)

    each = harness.measure_each(arguments, "graphs", arguments.graphs, measured_graph, markdown)
    for name, _ in each:
        print(f"{name}: measured", file=sys.stderr, flush=True)


def measure_graph(name: str, graph: Graph, *, shares: Sequence[float], time_limit_s: float) -> Row:
    """All figures of one graph; each row is printed to stderr when it is measured."""
    least_bytes = find_obstacle(graph).reached_bytes
    peak_bytes = simulate(graph, baseline(graph)).peak_bytes
    rows = []
    for share in shares:
        budget_bytes = least_bytes + int(share * (peak_bytes - least_bytes))
        row: Row = {"share": share, "budget_bytes": budget_bytes}
        row["recompute"] = search_figures(graph, budget_bytes, None, time_limit_s)
        for rate in LINKS_GB_PER_S:
            places = host_with_rate(rate)
            row[f"both_{rate}"] = search_figures(graph, budget_bytes, places, time_limit_s)
            row[f"offload_{rate}"] = offload_figures(graph, budget_bytes, places)
        rows.append(row)
        print(f"{name} {share}: {row}", file=sys.stderr, flush=True)
    return {
        "n_nodes": len(graph.nodes),
        "least_reached_bytes": least_bytes,
        "baseline_peak_bytes": peak_bytes,
        "resident_bytes": graph.resident_bytes,
        "rows": rows,
    }


def host_with_rate(gb_per_s: float) -> Places:
    return Places(host=Place(HOST_BYTES, Link(1e9 * gb_per_s, 1e9 * gb_per_s)))


def search_figures(
    graph: Graph, budget_bytes: int, places: Places | None, time_limit_s: float
) -> Row:
    """Search with `auto`: overhead, bound, gap, peak on the host and processor seconds.

    places: the host (None: recomputation alone).
    """
    began_s = time.process_time()
    proposal = METHODS["auto"](
        graph, budget_bytes=budget_bytes, time_limit_s=time_limit_s, seed=0, places=places
    )
    seconds = time.process_time() - began_s
    overhead, host_bytes = simulated_figures(graph, proposal.schedule, budget_bytes, places)
    bound = max(0.0, proposal.lower_bound_s / graph.baseline_time_s - 1.0)
    return {
        "overhead": overhead,
        "bound": bound,
        "gap": None if overhead is None else max(0.0, overhead - bound),
        "host_peak_bytes": host_bytes,
        "seconds": seconds,
        "timed_out": proposal.timed_out,
    }


def offload_figures(graph: Graph, budget_bytes: int, places: Places) -> Row:
    """The plain step with copies to the host alone: overhead (None: it exceeds the budget even
    so) and peak on the host."""
    assert places.host is not None
    folded, order = StorageGraph.of(graph), baseline(graph).order
    gaps = gaps_to_offload(folded, order, budget_bytes)
    host_only = Places(host=places.host)
    schedule = place_copies(
        folded, order, gaps, budget_bytes=budget_bytes, places=host_only
    ).schedule
    overhead, host_bytes = simulated_figures(graph, schedule, budget_bytes, places)
    return {"overhead": overhead, "host_peak_bytes": host_bytes}


def simulated_figures(
    graph: Graph, schedule: Schedule | None, budget_bytes: int, places: Places | None
) -> tuple[float | None, int]:
    """Simulated overhead (None: no schedule, or above the budget) and peak bytes on the host."""
    if schedule is None:
        return None, 0
    simulation = simulate(graph, schedule, places=places)
    fits = simulation.peak_bytes <= budget_bytes
    overhead = simulation.time_s / graph.baseline_time_s - 1.0
    return (overhead if fits else None), simulation.host_peak_bytes


def target_gap(name: str, share: float) -> float:
    """The gap that a plan should reach, as a share of the step's time."""
    if name not in CONV_NETS:
        return TARGET
    return TARGET_OF_TIGHT_NETS if share <= TIGHT_SHARE else TARGET_OF_NETS


def missed_targets(report: Row) -> list[str]:
    """Results that miss the target for the gap or for the search time, in words."""
    found = []
    for name, graph in report["graphs"].items():
        for row in graph["rows"]:
            largest_gap = target_gap(name, row["share"])
            for rate in LINKS_GB_PER_S:
                cell, where = row[f"both_{rate}"], f"{name} at {row['share']}, {rate} GB/s"
                if cell["gap"] is None or cell["gap"] > largest_gap:
                    found.append(
                        f"{where}: gap {percent(cell['gap'])}, target {percent(largest_gap)}"
                    )
                if cell["seconds"] > 2 * row["recompute"]["seconds"] + 2:
                    found.append(
                        f"{where}: {cell['seconds']:.1f} s, recomputation alone "
                        f"{row['recompute']['seconds']:.1f} s"
                    )
    return found


def gains_table(report: Row) -> str:
    """A table of how much copies reduce the overhead of recomputation and the memory for
    activations."""
    heads = ["", *(f"removed, {rate} GB/s" for rate in LINKS_GB_PER_S)]
    heads += ["activations, no host", *(f"{rate} GB/s" for rate in LINKS_GB_PER_S)]
    rows = []
    for name, graph in report["graphs"].items():
        removed = [_overhead_removed(graph["rows"], f"both_{rate}") for rate in LINKS_GB_PER_S]
        columns = ("recompute", *(f"both_{rate}" for rate in LINKS_GB_PER_S))
        rows.append([name, *removed, *(_times_less_memory(graph, column) for column in columns)])
    return table(heads, rows)


def _overhead_removed(rows: Sequence[Row], column: str) -> str:
    """The share of recomputation's overhead that copies remove, averaged over the rows."""
    alone = [(row["recompute"]["overhead"], row[column]["overhead"]) for row in rows]
    shares = [1 - both / one for one, both in alone if one and both is not None]
    return f"{100 * statistics.mean(shares):.0f} %" if shares else ""


def _times_less_memory(graph: Row, column: str) -> str:
    """How many times less memory activations take than without a plan, at the least budget in the
    table with an overhead below 20 %."""
    resident_bytes = graph["resident_bytes"]
    plain_bytes = graph["baseline_peak_bytes"] - resident_bytes
    fitting = [
        plain_bytes / (row["budget_bytes"] - resident_bytes)
        for row in graph["rows"]
        if row[column]["overhead"] is not None and row[column]["overhead"] < MAX_OVERHEAD
    ]
    return f"{max(fitting):.1f} times" if fitting else ""


def markdown(report: Row) -> str:
    """A table for each graph, the gains beside published ones, and what misses the targets."""
    parts = [
        "# Recomputation, copies to the host, and both\n",
        f"{harness.ran(report)}\n",
        LEGEND,
    ]
    for name, graph in report["graphs"].items():
        heads = ["share", "recompute", "s"]
        for rate in LINKS_GB_PER_S:
            heads += [f"both, {rate} GB/s", "s", "on the host GB", f"offload only, {rate} GB/s"]
        rows = []
        for row in graph["rows"]:
            cells = [str(row["share"]), *_cells(row["recompute"])]
            for rate in LINKS_GB_PER_S:
                both = row[f"both_{rate}"]
                cells += [*_cells(both), f"{both['host_peak_bytes'] / 1e9:.2f}"]
                cells.append(percent(row[f"offload_{rate}"]["overhead"]))
            rows.append(cells)
        parts += [f"## {name}\n", f"{graph['n_nodes']} ops.\n", table(heads, rows) + "\n"]
    parts += [
        "## Beside published gains\n",
        table(["", "measured by its authors"], PUBLISHED) + "\n",
    ]
    parts += [ABOUT_GAINS, gains_table(report) + "\n"]
    missed = missed_targets(report)
    parts.append(f"Misses: {len(missed)}." + "".join(f"\n- {text}" for text in missed) + "\n")
    return "\n".join(parts)


def _cells(row: Row) -> list[str]:
    return [f"{percent(row['bound'])} / {percent(row['overhead'])}", f"{row['seconds']:.1f}"]


if __name__ == "__main__":
    main()
