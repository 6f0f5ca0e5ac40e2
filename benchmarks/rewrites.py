"""How each set of rewrites changes the peak, the least budget and the overhead of some steps.

    python -m benchmarks.rewrites --out benchmarks/results/rewrites.json [--steps "NAME;NAME"]

Budgets are shares of the range from the plain step's least budget (0) to its peak without
checkpointing (1). Every step is traced with an H100's rates and without an optimizer, whose bytes
would be the same at every budget. The figures are written after each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from benchmarks import harness
from benchmarks.harness import Row, percent, table
from benchmarks.plan_quality import least_budget, search_figures
from benchmarks.zoo.graphs import example
from graphs.rewrites import Variants, allowed_variants, variants_of
from graphs.trace import CapturedStep
from solver.schedule import baseline, simulate

SETS = {
    "none": variants_of("none"),
    "in place": ((), ("in_place",)),
    "bitwise": variants_of("bitwise"),
    "allclose": variants_of("allclose"),
}
"""Name of a set of rewrites -> the variants of the step to plan, each as its rewrites."""
SHARES = (0.3, 0.1, 0.0)


def _llama(n_layers: int, n_tokens: int) -> Callable[[], CapturedStep]:
    batch = {"batch_size": 2, "seq_length": n_tokens}
    return example("llama", batch=batch, n_layers=n_layers)


STEPS: Mapping[str, Callable[[], CapturedStep]] = {
    "GPT-2 small, 8 x 1024, fp32": example("gpt2"),
    "Llama 8B, 4 layers, 2 x 8192, bf16": _llama(4, 8192),
    "Llama 8B, 4 layers, 2 x 2048, bf16": _llama(4, 2048),
    "Llama 8B, 32 layers, 2 x 2048, bf16": _llama(32, 2048),
    "Llama 8B, 32 layers, 2 x 8192, bf16": _llama(32, 8192),
}
BUDGETS_GB: Mapping[str, tuple[float, ...]] = {
    "GPT-2 small, 8 x 1024, fp32": (4, 3, 2.4),
    "Llama 8B, 4 layers, 2 x 8192, bf16": (20, 14),
}
"""Further budgets, below the range of the plain step, in GB."""


def main() -> None:
    parser = harness.parser("rewrites", __doc__, time_limit_s=600.0)
    parser.add_argument("--steps", type=harness.names(STEPS, ";"), default=list(STEPS))
    arguments = parser.parse_args()

    def measured(name: str) -> Row:
        budgets_gb = BUDGETS_GB.get(name, ())
        return measure(STEPS[name](), budgets_gb=budgets_gb, time_limit_s=arguments.time_limit)

    each = harness.measure_each(arguments, "steps", arguments.steps, measured, markdown)
    for name, report in each:
        print(f"{name}: {report['steps'][name]}", file=sys.stderr, flush=True)


def measure(step: CapturedStep, *, budgets_gb: tuple[float, ...], time_limit_s: float) -> Row:
    """Set of rewrites -> peak without checkpointing, least budget, and the plan at each budget."""
    traced = [(s.graph, s.captured) for s in step.variants(SETS["allclose"])]
    sets = {name: allowed_variants(traced, planned) for name, planned in SETS.items()}
    found: Row = {
        name: {"peak_bytes": least_peak_bytes(steps), "least": least_budget(steps), "plans": []}
        for name, steps in sets.items()
    }
    low, high = found["none"]["least"]["reached_bytes"], found["none"]["peak_bytes"]
    budgets = {f"{share:.0%}": low + int(share * (high - low)) for share in SHARES}
    budgets |= {f"{size} GB": int(size * 1e9) for size in budgets_gb}
    for name, steps in sets.items():
        for title, budget_bytes in budgets.items():
            plan = search_figures(steps, budget_bytes, time_limit_s=time_limit_s)
            found[name]["plans"].append({"budget": title, "budget_bytes": budget_bytes, **plan})
    return found


def least_peak_bytes(steps: Variants) -> int:
    """The peak without checkpointing of the variant that takes the least memory."""
    return min(simulate(graph, baseline(graph)).peak_bytes for graph in steps.planned)


def markdown(report: Row) -> str:
    """A table for each step."""
    parts = ["# Rewrites", harness.ran(report, cpus="one used")]
    for name, sets in report["steps"].items():
        budgets = [plan["budget"] for plan in sets["none"]["plans"]]
        rows = [
            [
                title,
                f"{found['peak_bytes'] / 1e9:.3f}",
                f"{found['least']['reached_bytes'] / 1e9:.3f}",
                f"{found['least']['proven_bytes'] / 1e9:.3f}",
                *map(_cell, found["plans"]),
            ]
            for title, found in sets.items()
        ]
        head = ["rewrites", "peak without plan GB", "least GB", "proven GB", *budgets]
        parts += [f"## {name}", table(head, rows)]
    parts.insert(2, "Overhead of the plan / proven bound, in percent of the plain step.")
    return "\n\n".join(parts) + "\n"


def _cell(plan: Row) -> str:
    late = " (time limit)" if plan["timed_out"] else ""
    if plan["bound"] is None:
        return f"nothing fits{late}"
    return f"{percent(plan['overhead'])} / {percent(plan['bound'])}{late}"


if __name__ == "__main__":
    main()
