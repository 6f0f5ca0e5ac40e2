"""Train random small modules with and without plans, and report what is not bitwise identical.

    python -m benchmarks.fuzz --n-models 1000 --out benchmarks/results/fuzz.json
    python -m benchmarks.fuzz --wide --n-models 200 --out benchmarks/results/fuzz_wide.json

Steps are rewritten in the ways that keep all bits, as `solve` does by default. Each module runs
under a schedule that saves nothing for backward and one that saves a random half. Every fifth also
runs under two schedules that take a search: that of the smallest feasible budget, and a plan for a
random budget between it and the peak without checkpointing. Three steps are compared bitwise: loss,
gradients, parameters, buffers and the random state. Results are written after every fifty modules,
so that a run that is stopped has some. With --wide, losses are over thousands of classes, which
plans may compute in row chunks.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from dataclasses import dataclass, field

import torch

from benchmarks import harness
from benchmarks.random_modules import WIDTH, RandomModule, Recipe, random_recipe, recipe_text
from benchmarks.same_bits import compare, solution_of, trained
from benchmarks.step_styles import STYLES, Training
from benchmarks.zoo import LOSS_INSIDE
from graphs.rewrites import Variants
from graphs.trace import TraceError, trace_variants
from solver.methods import find_obstacle
from solver.schedule import Request, Solution, baseline, keep, simulate
from solver.solving import attempt

TIME_LIMIT_S = 5.0
SEARCHED_EVERY = 5


@dataclass
class Tally:
    """Counts over all modules; mismatches and refusals as text, with the module's recipe."""

    n_models: int = 0
    n_plans: int = 0
    n_rewritten: int = 0
    n_chunked: int = 0
    n_recomputed: int = 0
    n_compared: int = 0
    mismatches: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def try_recipe(recipe: Recipe, rng: random.Random, tally: Tally, *, search: bool = True) -> None:
    """Run one module under several schedules and add the results to the tally.

    search: also run plans for a random budget and for the least one, which take a search.
    """
    torch.manual_seed(rng.randrange(10**6))
    model = RandomModule(recipe)
    batch = torch.randn(recipe.n_rows, WIDTH)
    tally.n_models += 1
    try:
        steps = trace_variants(model, batch)
    except TraceError as error:
        tally.refusals.append(f"{error} [{recipe_text(recipe)}]")
        return
    style = STYLES["plain"]
    expected, _ = trained(Training(copy.deepcopy(model), batch.clone(), LOSS_INSIDE), style)
    solutions = _searched_solutions(steps, rng) if search else []
    graph = steps.planned[-1]  # with the most rewrites
    random_half = {tensor.name for tensor in graph.tensors if rng.random() < 0.5}
    solutions += [solution_of(graph, keep(graph, kept)) for kept in (set[str](), random_half)]
    for solution in solutions:
        comparison = compare(model, batch, LOSS_INSIDE, style, solution, expected=expected)
        assert solution.simulation is not None
        tally.n_plans += 1
        tally.n_rewritten += bool(solution.graph.meta.rewrites)
        tally.n_chunked += any("chunked" in name for name in solution.graph.meta.rewrites)
        tally.n_recomputed += solution.simulation.n_recomputed
        tally.n_compared += comparison.n_compared
        if comparison.differences:
            tally.mismatches.append(f"{comparison.differences[0]} [{recipe_text(recipe)}]")


def _searched_solutions(steps: Variants, rng: random.Random) -> list[Solution]:
    """The schedule of the least feasible budget, and a plan for a random budget if one is found."""
    plain = simulate(steps.plain, baseline(steps.plain))
    obstacles = [find_obstacle(graph) for graph in steps.planned]
    least, graph = min(
        zip(obstacles, steps.planned, strict=True), key=lambda pair: pair[0].reached_bytes
    )
    assert least.schedule is not None
    solutions = [solution_of(graph, least.schedule)]
    budget_bytes = rng.randint(least.reached_bytes, plain.peak_bytes)
    request = Request(budget_bytes, time_limit_s=TIME_LIMIT_S, rewrites="bitwise")
    solution = attempt(steps, request, starts=[least.schedule])
    if solution.simulation is not None:
        solutions.append(solution)
    return solutions


def main() -> None:
    parser = harness.parser("fuzz", __doc__)
    parser.add_argument("--n-models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wide", action="store_true", help="losses over thousands of classes")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    rng, tally = random.Random(arguments.seed), Tally()
    for index in range(arguments.n_models):
        recipe = random_recipe(rng, wide=arguments.wide)
        try_recipe(recipe, rng, tally, search=index % SEARCHED_EVERY == 0)
        if index % 50 == 49 or index == arguments.n_models - 1:
            print(
                f"{tally.n_models} models, {tally.n_plans} plans, {len(tally.mismatches)} "
                f"mismatches, {len(tally.refusals)} refused",
                file=sys.stderr,
                flush=True,
            )
            report = {"circumstances": harness.circumstances(TIME_LIMIT_S), **vars(tally)}
            harness.write(arguments.out, report)
    sys.exit(bool(tally.mismatches))


if __name__ == "__main__":
    main()
