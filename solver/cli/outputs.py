"""What the command draws: the curve over budgets, pictures, the page.

Matplotlib is imported in the functions that draw, so that planning a saved graph starts at once.
"""

from __future__ import annotations

from pathlib import Path

from solver.analysis import (
    N_BUDGETS,
    Curve,
    SizeSearch,
    default_budgets,
    sweep,
)
from solver.cli.arguments import Arguments
from solver.cli.problem import Problem
from solver.cli.progress import Progress
from solver.common import counted, ctrl_c_ends_searches
from solver.reporting import Report, best
from solver.schedule import Solution

N_QUICK_BUDGETS = 8
QUICK_LIMIT_S, LONGEST_QUICK_LIMIT_S = 1.0, 3.0
"""The curve of a page that did not ask for one: this many budgets, so long a search for each, and
up to the longer limit where the answer itself took its time."""


def swept(
    arguments: Arguments, problem: Problem, solutions: list[Solution], progress: Progress
) -> tuple[Curve | None, bool]:
    """The curve that the pictures need, and whether Ctrl-C cut it short (None: before any point).

    With --pareto every method and N_BUDGETS budgets; for --report alone the answer's method, quick.
    """
    quick = arguments.pareto is None
    methods = [best(solutions).method] if quick else [solution.method for solution in solutions]
    limit_s = arguments.time_limit_s / N_BUDGETS
    if quick:
        as_answer_s = 2 * best(solutions).solve_time_s
        limit_s = min(limit_s, LONGEST_QUICK_LIMIT_S, max(QUICK_LIMIT_S, as_answer_s))
    try:
        with (
            progress.says("sweeping budgets for the curve") as say,
            ctrl_c_ends_searches() as interrupt,
        ):
            budgets = default_budgets(
                problem.graph,
                method=methods[0],
                reserve_bytes=problem.reserve_bytes,
                time_limit_s=limit_s,
                n_budgets=N_QUICK_BUDGETS if quick else N_BUDGETS,
                quick=quick,
            )
            curve = sweep(
                problem.graph,
                budgets=budgets,
                methods=methods,
                reserve_bytes=problem.reserve_bytes,
                time_limit_s=limit_s,
                seed=arguments.seed,
                known=[solution for solution in solutions if solution.method in methods],
                on_point=lambda n_done, n_all: say(f"{n_done} of {counted(n_all, 'plan')}"),
            )
    except KeyboardInterrupt:
        return None, True
    return curve if curve.points else None, interrupt.is_set()


def draw_memory(path: Path, solution: Solution) -> None:
    from solver.reporting.plot import before_and_after, save

    save(before_and_after(solution)[0], path)


def draw_curve(path: Path, curve: Curve, *, chosen: Solution) -> None:
    from solver.reporting.plot import pareto, save

    save(pareto(curve, chosen=chosen), path)


def draw_throughput(path: Path, search: SizeSearch) -> None:
    from solver.reporting.plot import save, throughput

    save(throughput(search), path)


def write_page(path: Path, report: Report, *, command: str, curve: Curve | None) -> None:
    from solver.reporting import write_page as write

    write(report, path, command=command, curve=curve)
