"""What the command line shows, from Python: `report`, `draw` and `sweep`.

Matplotlib is imported only when `draw` is called.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from graphs.graph import Graph
from graphs.rewrites import Variants
from solver.plan_analysis import Curve, SizeSearch, advise, pareto
from solver.reporting import Report, describe_costs, step_notes
from solver.schedule import Request, Solution
from solver.sizes_deadlines_progress import (
    IN_PYTHON,
    counted,
    describe_type,
    format_time,
    names_checked,
    now_s,
    parse_size,
    tell,
    telling,
)

PLOT_SUFFIXES = (".png", ".svg")


def report(solution: Solution, *, file: TextIO | None = None) -> None:
    """Print the request, the memory at the peak, the plan, its lower bound and advice.

    file: the text stream to print to (default: stdout); the text is coloured if it is a terminal.

    Raises TypeError for anything but a Solution.
    """
    if not isinstance(solution, Solution):
        raise TypeError(
            f"report() was given {describe_type(solution)}; it takes the Solution that "
            "solve(model, batch, ...) returns: report(solution), with file= to print elsewhere "
            "than to stdout"
        )
    from rich.console import Console

    from solver.reporting import terminal

    graph = solution.graph
    shown = Report(
        problem=graph.meta.model or "graph",
        device=graph.meta.device or "not specified",
        costs=describe_costs(graph.meta.cost_model),
        solutions=(solution,),
        notes=tuple(step_notes(graph)),
        advice=advise(solution, reader=IN_PYTHON),
        reader=IN_PYTHON,
    )
    console = Console(
        file=sys.stdout if file is None else file, highlight=False, emoji=False, markup=False
    )
    terminal.show(shown, console)


def draw(
    shown: Solution | Curve | SizeSearch, path: str | Path, *, chosen: Solution | None = None
) -> None:
    """Plot a result to a file.

    shown: a Solution (plots memory over the step), a Curve (overhead against budget) or a
        SizeSearch (throughput against size).
    path: name of the file, which must end in .png or .svg.
    chosen: a plan to mark on the curve.

    Raises ValueError for another ending or a Solution without a schedule, TypeError if `shown` is
    another object.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"draw() was given {describe_type(path)} as the file's name; write "
            'draw(solution, "plan.png")'
        )
    path = Path(path)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(f"{path}: the name must end in .png or .svg")
    from solver.reporting import plot

    if isinstance(shown, Curve):
        axes = plot.pareto(shown, chosen=chosen)
    elif isinstance(shown, SizeSearch):
        axes = plot.throughput(shown)
    elif not isinstance(shown, Solution):
        raise TypeError(
            f"draw() was given {describe_type(shown)}; it takes a Solution (of solve), a Curve (of "
            "sweep) or a SizeSearch"
        )
    elif shown.schedule is None:
        raise ValueError(f"no schedule to draw: the status is {shown.status}{shown.obstacle_text}")
    else:
        axes = plot.before_and_after(shown)[0]
    plot.save(axes, path)


@names_checked
def sweep(
    problem: Solution | Graph | Variants,
    *,
    budgets: int | float | str | Iterable[int | float | str] | None = None,
    methods: Sequence[str] = ("auto",),
    time_limit_s: float = 10.0,
    seed: int = 0,
    capacity_bytes: int | None = None,
) -> Curve:
    """Plan the step for each budget and method, to see how overhead changes with the budget.

    problem: a Graph, the Variants of one step, or a Solution. The step, the reserve and the use of
        host memory are those of the Solution, and if `methods` has its method, it is a point too.
    budgets: one or several sizes as in `solve` (None: 20 budgets from the minimum to the
        baseline's peak).
    methods: names of the methods, as in `solve`.
    time_limit_s: of each search, in seconds.
    seed: of the random numbers of each search.
    capacity_bytes: the bytes that budgets in percent refer to.

    Raises TypeError for anything but a Solution, a Graph or Variants.
    """
    if not isinstance(problem, Solution | Graph | Variants):
        raise TypeError(
            f"sweep() was given {describe_type(problem)}; it takes the Solution that "
            "solve(model, batch, ...) returns, or a Graph"
        )
    solution = problem if isinstance(problem, Solution) else None
    step = problem.step if isinstance(problem, Solution) else problem
    given = (budgets,) if isinstance(budgets, int | float | str) else budgets
    sizes = None if given is None else _sizes(given, capacity_bytes=capacity_bytes)
    like = solution.request if solution else Request(budget_bytes=0)
    name, started_s = Variants.of(step).plain.meta.model or "graph", now_s()
    with telling(f"sweeping budgets of {name}...") as say:
        curve = pareto.sweep(
            step,
            budgets=sizes,
            methods=methods,
            like=dataclasses.replace(like, time_limit_s=time_limit_s, seed=seed),
            known=[solution] if solution and solution.method in methods else [],
            on_point=lambda n_done, n_all: say(
                f"sweeping budgets of {name}: {n_done} of {counted(n_all, 'plan')}"
            ),
        )
    plans = counted(sum(point.schedule is not None for point in curve.points), "plan")
    budgets_tried = counted(len({p.request.budget_bytes for p in curve.points}), "budget")
    tell(f"{name}: {plans} for {budgets_tried} in {format_time(now_s() - started_s)}")
    return curve


def _sizes(given: Iterable[int | float | str], *, capacity_bytes: int | None) -> pareto.Budgets:
    """The budgets in bytes, with the schedules that those of `default_budgets` bring."""
    schedules = given.schedules if isinstance(given, pareto.Budgets) else ()
    return pareto.Budgets.of(
        (parse_size(each, capacity_bytes=capacity_bytes) for each in given), schedules
    )
