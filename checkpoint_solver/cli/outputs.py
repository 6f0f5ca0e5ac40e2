"""Outputs made after the plan: another system's setting, the verified step, plots and the page.

Ctrl-C drops the output that is being made; the plan itself has been saved before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from checkpoint_solver.cli.arguments import Arguments
from checkpoint_solver.cli.problem import Problem
from checkpoint_solver.cli.progress import Progress
from checkpoint_solver.cli.running_here import VerifyError
from solver.module_checkpointing.for_other_frameworks import nearest
from solver.plan_analysis import N_BUDGETS, Curve, sweep
from solver.python_api import draw
from solver.reporting import Report, write_page
from solver.sizes_deadlines_progress import counted, ctrl_c_ends_searches

N_QUICK_BUDGETS = 8
"""The number of budgets in the curve of a page without --pareto."""


@dataclass(frozen=True)
class LaterOutput:
    """An output that is made after the plan.

    options: it is made if one of these options was given.
    make: makes it; returns the report with it.
    is_short: made even after Ctrl-C has ended the search.
    takes_minutes: the report so far is printed before it is made.
    part: what it is of the option's output, for a note: "the curve of "; "" if it is all of it.
    """

    options: tuple[str, ...]
    make: Callable[[Arguments, Problem, Report, Progress], Report]
    is_short: bool = False
    takes_minutes: bool = False
    part: str = ""

    def without(self, report: Report, given: str) -> Report:
        """The report with a note that Ctrl-C left this output out.

        given: those of `options` that were given, as text.
        """
        note = f"Interrupted: {self.part}{given} left out."
        is_verified = self.make is _verify and report.best.schedule is not None
        return dataclasses.replace(
            report,
            notes=(*report.notes, note),
            verify_error="interrupted" if is_verified else report.verify_error,
            interrupted=True,
        )


def _add_emitted_setting(
    arguments: Arguments, _: Problem, report: Report, progress: Progress
) -> Report:
    """Add the closest setting of another system."""
    assert arguments.emit is not None
    with progress.showing(f"simulating settings of {arguments.emit}"):
        graph, fit_bytes = report.best.plain, report.best.request.available_bytes
        found = nearest(graph, system=arguments.emit, budget_bytes=fit_bytes)
        return dataclasses.replace(report, emitted=found)


def _verify(_: Arguments, problem: Problem, report: Report, progress: Progress) -> Report:
    """Add the result of running the step. Raises LoadError if the model cannot be built."""
    if report.best.schedule is None:
        return report
    assert problem.verify is not None  # --verify is rejected for a graph file
    try:
        with progress.showing("verifying", always=True) as say:
            return dataclasses.replace(report, verification=problem.verify(report.best, say))
    except VerifyError as error:
        return dataclasses.replace(report, verify_error=str(error))


def _add_curve(
    arguments: Arguments, problem: Problem, report: Report, progress: Progress
) -> Report:
    """Add the curve of overhead against budget; after Ctrl-C it has the points computed so far.

    With --pareto it has every method and N_BUDGETS budgets, with --report alone the best plan's
    method and N_QUICK_BUDGETS. The searches of a method share the time limit, which quick searches
    do not reach.
    """
    quick, notes = arguments.pareto is None, list(report.notes)
    methods = [solution.method for solution in ((report.best,) if quick else report.solutions)]
    n_budgets = N_QUICK_BUDGETS if quick else N_BUDGETS
    curve: Curve | None = None
    interrupted = True
    with (
        contextlib.suppress(KeyboardInterrupt),
        progress.showing("sweeping budgets for the curve") as say,
        ctrl_c_ends_searches() as interrupt,
    ):
        found = sweep(
            problem.step,
            n_budgets=n_budgets,
            methods=methods,
            like=dataclasses.replace(
                problem.request, time_limit_s=arguments.time_limit / n_budgets
            ),
            quick=True,
            known=[solution for solution in report.solutions if solution.method in methods],
            on_point=lambda n_done, n_all: say(f"{n_done} of {counted(n_all, 'plan')}"),
        )
        curve, interrupted = found if found.points else None, interrupt.is_set()
    if interrupted:
        part = "it is not drawn" if curve is None else "it has the points computed so far"
        notes.append(f"Interrupted while sweeping budgets for the curve: {part}.")
    if curve is not None and (n_late := sum(point.timed_out for point in curve.points)):
        notes.append(
            f"For {n_late} of the {len(curve.points)} points of the curve the search stopped at "
            "its share of the time limit, so faster plans may exist there: raise --time-limit."
        )
    return dataclasses.replace(report, curve=curve, notes=tuple(notes), interrupted=interrupted)


def _write_plots_and_page(
    arguments: Arguments, _: Problem, report: Report, progress: Progress
) -> Report:
    """Write plots and page, and list them in the report."""
    files, notes = list(report.files), list(report.notes)
    with progress.showing("drawing"):
        if arguments.plot is not None and report.best.schedule is None:
            notes.append(f"{arguments.plot} is not written: there is no plan to plot.")
        elif arguments.plot is not None:
            draw(report.best, arguments.plot)
            files.append(("memory plot", arguments.plot))
        if arguments.throughput is not None and report.sizes is not None:
            draw(report.sizes, arguments.throughput)
            files.append(("throughput plot", arguments.throughput))
        if arguments.pareto is not None and report.curve is not None:
            draw(report.curve, arguments.pareto, chosen=report.best)
            files.append(("budget plot", arguments.pareto))
        if arguments.report is not None:
            files.append(("page", arguments.report))
        report = dataclasses.replace(report, files=tuple(files), notes=tuple(notes))
        if arguments.report is not None:
            write_page(report, arguments.report, command=arguments.command)
    return report


LATER_OUTPUTS = (
    LaterOutput(("emit",), _add_emitted_setting),
    LaterOutput(("verify",), _verify, takes_minutes=True),
    LaterOutput(("pareto", "report"), _add_curve, part="the curve of "),
    LaterOutput(("plot", "throughput", "pareto", "report"), _write_plots_and_page, is_short=True),
)
"""The outputs in the order in which they are made."""
