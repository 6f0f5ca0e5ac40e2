"""What each stage of `auto` contributes: overhead and gap with one stage left out at a time.

    python -m benchmarks.ablation --graphs unet,lstm-20 --shares 0.3,0.1

Shares of the budget are those of `benchmarks.plan_quality`. Eviction and recombination get a
quarter of their usual work limits, so that a cell takes seconds. If the single cut closes the gap,
no other stage runs.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

from benchmarks import harness
from benchmarks.zoo.graphs import GRAPHS, example
from graphs.graph import Graph
from solver.methods import find_obstacle
from solver.methods.auto import recombine, search, stages
from solver.schedule import baseline, simulate

Replacements = dict[tuple[Any, str], Any]

QUICK: Replacements = {
    (stages, "MAX_WORK"): stages.MAX_WORK // 4,
    (recombine, "MAX_WORK"): recombine.MAX_WORK // 4,
}


def _without_stage(name: str) -> Replacements:
    return {
        (stages, kind): tuple(s for s in getattr(stages, kind) if s.__name__ != name)
        for kind in ("CHEAP_STAGES", "STAGES")
    }


VARIANTS: dict[str, Replacements] = {
    "nothing": {},
    "nested reversals": _without_stage("nested_reversals"),
    "anchored cut": _without_stage("anchored_cut"),
    "other methods": _without_stage("other_methods"),
    "eviction": _without_stage("eviction"),
    "windows": _without_stage("windows"),
    "several cuts": _without_stage("several_cuts"),
    "local optimum": {(search, "drop_recomputation"): lambda _, schedule, **_options: schedule},
    "recombination": _without_stage("recombination"),
}
"""Name of the stage that is left out -> the attributes to patch, with their replacements."""


SOURCES = GRAPHS | {"lstm-20": example("lstm", batch={"seq_length": 20})}


def cell(graph: Graph, budget_bytes: int, replacements: Replacements) -> str:
    """Plan for the budget with these attributes patched: overhead and gap in percent, and
    processor seconds, as text."""
    began_s = time.process_time()
    with contextlib.ExitStack() as stack:
        for (owner, name), value in (QUICK | replacements).items():
            stack.enter_context(mock.patch.object(owner, name, value))
        proposal = stages.recompute_only(graph, budget_bytes=budget_bytes, time_limit_s=300.0)
    seconds = time.process_time() - began_s
    if proposal.schedule is None:
        return f"none ({seconds:.0f} s)"
    time_s = simulate(graph, proposal.schedule).time_s
    overhead, gap = (t / graph.baseline_time_s for t in (time_s, time_s - proposal.lower_bound_s))
    return f"{100 * (overhead - 1):.2f}, gap {100 * max(gap, 0):.2f} ({seconds:.0f} s)"


def main() -> None:
    parser = harness.parser("ablation", __doc__)
    parser.add_argument("--graphs", type=harness.names(SOURCES), default=["unet"])
    parser.add_argument("--shares", type=harness.shares, default=(0.5, 0.3, 0.1))
    arguments = parser.parse_args()
    for name in arguments.graphs:
        source = SOURCES[name]()
        graph = source if isinstance(source, Graph) else source.graph
        least_bytes = find_obstacle(graph).reached_bytes
        peak_bytes = simulate(graph, baseline(graph)).peak_bytes
        for share in arguments.shares:
            budget_bytes = least_bytes + int(share * (peak_bytes - least_bytes))
            for removed, replacements in VARIANTS.items():
                print(f"| {name} {share} | {removed} | {cell(graph, budget_bytes, replacements)} |")


if __name__ == "__main__":
    main()
