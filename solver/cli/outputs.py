"""The curve of overhead against budget, for --pareto and for the page."""

from __future__ import annotations

from typing import Any

from solver.analysis import N_BUDGETS, Curve, default_budgets, sweep
from solver.cli.arguments import Arguments
from solver.cli.problem import Problem
from solver.cli.progress import Progress
from solver.common import counted, ctrl_c_ends_searches
from solver.reporting import best
from solver.schedule import Solution

N_QUICK_BUDGETS = 8
"""Of the curve of a page without --pareto."""


def swept(
    arguments: Arguments, problem: Problem, solutions: list[Solution], progress: Progress
) -> tuple[Curve | None, bool]:
    """The curve, None without any point, and whether Ctrl-C cut it short.

    --pareto: every method and N_BUDGETS budgets; --report alone: the answer's method and fewer.
    The searches of a method share the time limit, which quick ones do not reach.
    """
    quick = arguments.pareto is None
    methods = [best(solutions).method] if quick else [solution.method for solution in solutions]
    n_budgets = N_QUICK_BUDGETS if quick else N_BUDGETS
    limit_s = arguments.time_limit / n_budgets
    common: dict[str, Any] = {"reserve_bytes": problem.reserve_bytes, "time_limit_s": limit_s}
    what = "sweeping budgets for the curve"
    try:
        with progress.says(what) as say, ctrl_c_ends_searches() as interrupt:
            curve = sweep(
                problem.step,
                budgets=default_budgets(
                    problem.step, method=methods[0], n_budgets=n_budgets, quick=quick, **common
                ),
                methods=methods,
                seed=arguments.seed,
                quick=True,
                rewrites=problem.rewrites,
                places=problem.places,
                known=[solution for solution in solutions if solution.method in methods],
                on_point=lambda n_done, n_all: say(f"{n_done} of {counted(n_all, 'plan')}"),
                **common,
            )
    except KeyboardInterrupt:
        return None, True
    return curve if curve.points else None, interrupt.is_set()
