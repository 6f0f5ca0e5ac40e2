"""What each stage of `auto` contributes: overhead and gap with one stage at a time left out.

    python -m benchmarks.ablation --graphs unet,lstm-20 [--shares 0.5,0.1] >> rows.md

Shares as in `benchmarks.plan_quality`. Only cells that the single cut leaves open are shown. The
work of eviction and recombination is a quarter of the usual, so that a cell takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks.zoo.graphs import GRAPHS
from graphs.graph import Graph
from graphs.synthetic import nets
from solver.methods import find_obstacle
from solver.methods.auto import recombine, stages
from solver.schedule import baseline, simulate

SMALL = {"lstm-20": lambda: nets.recurrent(n_steps=20), "tiny": lambda: nets.random_dag(seed=3)}
QUICK: dict[tuple[Any, str], Any] = {
    (stages, "MAX_WORK"): stages.MAX_WORK // 4,
    (recombine, "NODES_TIMES_COLUMNS"): recombine.NODES_TIMES_COLUMNS // 4,
}


def _without(*names: str) -> dict[tuple[Any, str], Any]:
    return {
        (stages, kind): tuple(s for s in getattr(stages, kind) if s.__name__ not in names)
        for kind in ("CHEAP_STAGES", "STAGES")
    }


VARIANTS: dict[str, dict[tuple[Any, str], Any]] = {
    "all stages": {},
    "anchored cut": _without("anchored_cut"),
    "other methods": _without("other_methods"),
    "eviction": _without("eviction"),
    "several cuts": _without("several_cuts"),
    "local optimum": {(stages, "drop_recomputation"): lambda _, schedule, **_options: schedule},
    "recombination": _without("recombination"),
    "random factors": {(stages, "N_RECOMBINATIONS"): 0},
}
"""By the name of what is left out: attributes that are replaced."""


@contextlib.contextmanager
def replaced(attributes: dict[tuple[Any, str], Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for (owner, name), value in attributes.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def cell(graph: Graph, budget_bytes: int, without: dict[tuple[Any, str], Any]) -> tuple[str, bool]:
    """Overhead, gap and seconds, and whether the single cut was not enough."""
    began_s = time.process_time()
    with replaced(QUICK | without):
        found = stages.auto(graph, budget_bytes=budget_bytes, time_limit_s=300.0, seed=0)
    seconds = time.process_time() - began_s
    if found.schedule is None:
        return f"none ({seconds:.0f} s)", True
    overhead = simulate(graph, found.schedule).time_s / graph.baseline_time_s - 1.0
    gap = overhead + 1.0 - found.lower_bound_s / graph.baseline_time_s
    return f"{100 * overhead:.2f}, gap {100 * max(gap, 0):.2f} ({seconds:.0f} s)", True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation")
    parser.add_argument("--graphs", default="unet", help=", ".join([*GRAPHS, *SMALL]))
    parser.add_argument("--shares", default="0.9,0.7,0.5,0.3,0.1")
    given = parser.parse_args()
    for name in given.graphs.split(","):
        source = (SMALL | GRAPHS)[name]()
        graph = source if isinstance(source, Graph) else source.graph
        least_bytes = find_obstacle(graph).reached_bytes
        peak_bytes = simulate(graph, baseline(graph)).peak_bytes
        for share in map(float, given.shares.split(",")):
            budget_bytes = least_bytes + int(share * (peak_bytes - least_bytes))
            cells = [cell(graph, budget_bytes, without)[0] for without in VARIANTS.values()]
            print("| " + " | ".join([f"{name} {share}", *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
