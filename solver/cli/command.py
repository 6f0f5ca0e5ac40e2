"""The command `solve`: a model or a graph and a budget in; a report, a schedule and pictures out.

    solve --budget 8GB examples/gpt2.py

Planning a saved graph starts at once: torch and matplotlib are imported only where a model has to
be traced or a picture drawn. Everything that a person can get wrong ends in one line on stderr and
an exit code (`Exit`), never in a traceback.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from rich.console import Console

from graphs.files import FormatError
from graphs.graph import GraphError
from solver.analysis import SizeSearch, advise
from solver.cli import explain, outputs
from solver.cli.arguments import Arguments, UsageError, parse
from solver.cli.largest_batch import maximised, size_notes
from solver.cli.model_file import LoadError, SizeError
from solver.cli.problem import Problem, opened_problem
from solver.cli.progress import Progress
from solver.common import (
    BudgetError,
    counted,
    ctrl_c_ends_searches,
    format_both,
    reject_missing_unit,
)
from solver.device import DeviceError
from solver.emit import NoLayersError, layers, nearest
from solver.methods import MissingSolverError, TooLargeError
from solver.reporting import (
    Report,
    best,
    terminal,
    to_json,
)
from solver.runtime_hooks import (
    Planned,
    SubmodulePlanner,
    Verifier,
    VerifyError,
    load_submodule_planner,
    load_verifier,
)
from solver.schedule import Request, Solution
from solver.solving import attempt, explained

EXPLAIN = "explain"
"""The one word that is no problem to plan: a model file ends in .py, a graph in .json, and a module
has a dot in its name or a colon after it."""


class Exit(IntEnum):
    """What the command's exit status means."""

    SOLVED = 0
    USAGE = 2
    INFEASIBLE = 3
    NOT_LOADED = 4
    NOT_VERIFIED = 5
    NOT_FOUND = 6
    INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. argv: without the program's name."""
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal cannot show must not end the report.
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == [EXPLAIN]:
        return _ended(lambda: explain.main(words[1:]), as_json="--json" in words)
    try:
        arguments = parse(words)
    except UsageError as error:
        return _failed(Exit.USAGE, str(error), as_json=False)
    return _ended(lambda: _run(arguments), as_json=arguments.json)


def _ended(run: Callable[[], int], *, as_json: bool) -> int:
    """The exit status of what is run, whatever a person got wrong."""
    try:
        return run()
    except (UsageError, BudgetError, DeviceError, SizeError) as error:
        return _failed(Exit.USAGE, str(error), as_json=as_json)
    except (LoadError, FormatError, GraphError) as error:
        return _failed(Exit.NOT_LOADED, str(error), as_json=as_json)
    except BrokenPipeError:
        # Whoever read our output has enough; the interpreter must not complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.SOLVED
    except KeyboardInterrupt:
        return _failed(Exit.INTERRUPTED, "interrupted", as_json=as_json)


def _failed(code: Exit, message: str, *, as_json: bool) -> int:
    """One line on stderr, and with --json an object on stdout as well."""
    line = " ".join(message.split())
    print(f"solve: {line}", file=sys.stderr)
    if as_json:
        print(json.dumps({"status": "error", "error": line, "exit_code": int(code)}))
    return code


def _run(arguments: Arguments) -> int:
    progress = Progress(quiet=arguments.quiet)
    with opened_problem(arguments, progress=progress.says, planner=_plan_submodules) as problem:
        reject_missing_unit(arguments.budget, resident_bytes=problem.graph.resident_bytes)
        _check_layers(arguments, problem)
        if arguments.largest is not None:
            problem, search = maximised(arguments, problem, progress)
            report = _of_largest(problem, search, progress)
        else:
            report = _plan(arguments, problem, progress)
        if arguments.emit is not None:
            with progress.says(f"judging the settings of {arguments.emit}"):
                report = _with_setting(arguments.emit, report)
        report = _saved(arguments, report)
        if arguments.verify and report.best.schedule is not None:
            with progress.says("verifying: running the step with and without the plan"):
                report = _verify(problem, report)
        report = _drawn(arguments, problem, report, progress)
    code = _exit_code(report)
    if arguments.json:
        print(json.dumps({**to_json(report), "exit_code": int(code)}, indent=1, allow_nan=False))
    elif not arguments.quiet:
        terminal.show(report, Console(highlight=False, emoji=False, markup=False))
    if code is not Exit.SOLVED:
        print(f"solve: {_why(code, report)}", file=sys.stderr)
    return code


def _check_layers(arguments: Arguments, problem: Problem) -> None:
    """Find out before the search that no setting can be named. Raises UsageError."""
    if arguments.emit is None:
        return
    try:
        layers(problem.graph)
    except NoLayersError as error:
        raise UsageError(f"--emit {arguments.emit}: {error}") from error


def _with_setting(system: str, report: Report) -> Report:
    solution = report.best
    found = nearest(solution.graph, system=system, budget_bytes=solution.request.available_bytes)
    return dataclasses.replace(report, emitted=found)


def _plan_submodules(**asked: Any) -> Planned:
    planner: SubmodulePlanner = load_submodule_planner()
    return planner(**asked)


def _plan(arguments: Arguments, problem: Problem, progress: Progress) -> Report:
    """Search with every method."""
    if problem.planned is not None:
        return Report(
            problem=problem.name,
            device=problem.device,
            costs=problem.costs,
            solutions=(problem.planned,),
            notes=problem.notes,
            reserve_reason=problem.reserve_reason,
        )
    solutions, refused, interrupted = _search(arguments, problem, progress)
    notes = list(problem.notes)
    if interrupted:
        notes.append("Interrupted: this is the best that was found until then.")
    return Report(
        problem=problem.name,
        device=problem.device,
        costs=problem.costs,
        solutions=tuple(solutions),
        refused=tuple(refused),
        notes=tuple(notes),
        reserve_reason=problem.reserve_reason,
        advice=advise(best(solutions)),
        interrupted=interrupted,
    )


def _of_largest(problem: Problem, search: SizeSearch, progress: Progress) -> Report:
    """The report of the largest size that has a plan, or of the smallest that has none."""
    chosen = search.largest or search.candidates[0]
    solution, unexplained = _explained(chosen.solution, progress)
    notes = list(problem.notes)
    if unexplained:
        notes.append("Interrupted: what stands in the way was not looked for to the end.")
    if search.interrupted:
        notes.append("Interrupted: this is the largest that was found to fit until then.")
    notes += size_notes(search)
    return Report(
        problem=problem.name,
        device=problem.device,
        costs=problem.costs,
        solutions=(solution,),
        notes=tuple(notes),
        reserve_reason=problem.reserve_reason,
        advice=advise(solution),
        interrupted=search.interrupted or unexplained,
        sizes=search,
    )


def _saved(arguments: Arguments, report: Report) -> Report:
    """Write schedule and graph at once: what follows may take long, or be interrupted."""
    files = list(report.files)
    if arguments.schedule_out is not None and report.best.schedule is not None:
        report.best.save(arguments.schedule_out)
        files.append(("schedule", arguments.schedule_out))
    if arguments.graph_out is not None:
        report.best.graph.save(arguments.graph_out)
        files.append(("graph", arguments.graph_out))
    return dataclasses.replace(report, files=tuple(files))


def _drawn(arguments: Arguments, problem: Problem, report: Report, progress: Progress) -> Report:
    """Draw what was asked for; the report with the files' names. Ctrl-C leaves out what is left."""
    files, notes, curve = list(report.files), list(report.notes), None
    if (arguments.pareto or arguments.report) and not report.interrupted:
        curve, interrupted = outputs.swept(arguments, problem, list(report.solutions), progress)
        if interrupted:
            part = "it is not drawn" if curve is None else "it has the points found until then"
            notes.append(f"Interrupted while the curve was computed: {part}.")
    with progress.says("drawing"):
        if arguments.plot is not None and report.best.schedule is not None:
            outputs.draw_memory(arguments.plot, report.best)
            files.append(("memory plot", arguments.plot))
        if arguments.throughput is not None and report.sizes is not None:
            outputs.draw_throughput(arguments.throughput, report.sizes)
            files.append(("throughput plot", arguments.throughput))
        if arguments.pareto is not None and curve is not None:
            outputs.draw_curve(arguments.pareto, curve, chosen=report.best)
            files.append(("budget plot", arguments.pareto))
        if arguments.report is not None:
            files.append(("page", arguments.report))
        report = dataclasses.replace(report, files=tuple(files), notes=tuple(notes))
        if arguments.report is not None:
            outputs.write_page(arguments.report, report, command=arguments.command, curve=curve)
    return report


def _search(
    arguments: Arguments, problem: Problem, progress: Progress
) -> tuple[list[Solution], list[tuple[str, str]], bool]:
    """The answer of each method, what refused the graph, and whether Ctrl-C ended the search.

    Ctrl-C gives the best so far; raises KeyboardInterrupt if nothing has been found by then.
    """
    solutions: list[Solution] = []
    refused: list[tuple[str, str]] = []
    for method in arguments.methods:
        request = Request(
            budget_bytes=problem.budget_bytes,
            reserve_bytes=problem.reserve_bytes,
            method=method,
            time_limit_s=arguments.time_limit_s,
            seed=arguments.seed,
        )
        what = f"searching with {method} ({counted(len(problem.graph.nodes), 'op')})"
        try:
            with progress.says(what), ctrl_c_ends_searches() as interrupt:
                solutions.append(attempt(problem.graph, request))
        except (
            TooLargeError,
            MissingSolverError,
        ) as error:  # the graph is not one for this method, and it says why
            if len(arguments.methods) == 1:
                raise UsageError(f"--method {method}: {error}") from error
            refused.append((method, str(error)))
        if interrupt.is_set():
            if not solutions or best(solutions).schedule is None:
                raise KeyboardInterrupt
            return solutions, refused, True
    bound_s = max(solution.lower_bound_s for solution in solutions)
    solutions = [solution.with_bound(bound_s) for solution in solutions]
    interrupted = False
    if best(solutions).schedule is None:
        solutions[0], interrupted = _explained(solutions[0], progress)
    return solutions, refused, interrupted


def _explained(solution: Solution, progress: Progress) -> tuple[Solution, bool]:
    """With what stands in the way, if there is no schedule; and whether Ctrl-C cut that short."""
    with progress.says("searching for the least budget"), ctrl_c_ends_searches() as interrupt:
        return explained(solution), interrupt.is_set()


def _verify(problem: Problem, report: Report) -> Report:
    """The report with what the run found; raises LoadError if the model cannot be built."""
    assert problem.verify is not None  # a graph file was refused with --verify
    verifier: Verifier = load_verifier()
    try:
        verification = problem.verify(verifier, report.best)
    except VerifyError as error:
        return dataclasses.replace(report, verify_error=str(error))
    except KeyboardInterrupt:  # the plan is there all the same
        return dataclasses.replace(report, verify_error="it was interrupted", interrupted=True)
    return dataclasses.replace(report, verification=verification)


def _exit_code(report: Report) -> Exit:
    if report.best.schedule is not None:
        found = report.verification
        failed = report.verify_error or (found is not None and not found.passed)
        return Exit.NOT_VERIFIED if failed else Exit.SOLVED
    proven = any(solution.proven_infeasible for solution in report.solutions)
    late = any(solution.status == "time_limit" for solution in report.solutions)
    return Exit.NOT_FOUND if late and not proven else Exit.INFEASIBLE


def _why(code: Exit, report: Report) -> str:
    """The one line on stderr beside a report that holds no schedule, or one that failed."""
    solution = report.best
    budget = format_both(solution.request.budget_bytes)
    if code is Exit.NOT_VERIFIED:
        if report.verification is None:
            return f"--verify: {report.verify_error}"
        if not report.verification.fits:
            return "--verify: the measured peak is above the budget"
        return f"--verify: not the same bits: {report.verification.differences[0]}"
    if code is Exit.NOT_FOUND:
        return f"nothing found for {budget} within the time limit; --time-limit gives it longer"
    line = f"infeasible: nothing fits {budget}"
    if not any(s.proven_infeasible for s in report.solutions):
        line = f"infeasible: method {solution.method} finds nothing that fits {budget}"
    return line + solution.obstacle_text
