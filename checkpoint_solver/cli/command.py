"""The command `solve`: from a model or graph and a budget to a report, a schedule and plots.

    solve --budget 8GB examples/gpt2.py

A saved graph is planned without loading torch or Matplotlib: they are imported only to trace a
model or to draw a plot. Every user error ends in one line on stderr and an exit code (`Exit`),
never in a traceback.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from checkpoint_solver.cli import explain, outputs
from checkpoint_solver.cli.arguments import Arguments
from checkpoint_solver.cli.ctrl_c import Watch, exit_now
from checkpoint_solver.cli.exit_codes import Exit, error_line, exit_code
from checkpoint_solver.cli.largest_batch import SIZE_WORDS, find_largest, size_notes
from checkpoint_solver.cli.model_file import SizeError
from checkpoint_solver.cli.model_source import CONFIGURATION, LoadError
from checkpoint_solver.cli.pipeline_stages import failing_stage
from checkpoint_solver.cli.problem import Problem, open_problem
from checkpoint_solver.cli.progress import Progress
from checkpoint_solver.cli.reading_arguments import parse
from checkpoint_solver.cli.usage import UsageError
from graphs.files import FormatError
from graphs.graph import Graph, GraphError
from solver.device_and_costs import DeviceError
from solver.methods import MissingSolverError, TooLargeError
from solver.module_checkpointing.for_other_frameworks import NoLayersError, layers
from solver.plan_analysis import SizeSearch, advise
from solver.reporting import Report, best, terminal, to_json, write_snapshot
from solver.schedule import Solution
from solver.sizes_deadlines_progress import (
    OF_THE_COMMAND,
    BudgetError,
    abandoned_calls_are_running,
    counted,
    ctrl_c_ends_searches,
    end_idle_workers,
    reject_missing_unit,
    silenced,
)
from solver.solving import attempt, with_obstacle

EXPLAIN = "explain"
"""Never the name of a problem: files end in .py or .json, and modules have a dot or a colon."""
OBJECTS_BETWEEN_COLLECTIONS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command without changing settings of this process; returns the exit code.

    argv: the arguments without the program's name (None: those of this process).
    """
    try:
        return _run_command_line(list(sys.argv[1:] if argv is None else argv), Watch())
    except BrokenPipeError:  # the reader of the pipe has closed it
        return Exit.SOLVED
    finally:
        end_idle_workers()


def process() -> int:
    """Run the command in a process of its own, whose settings it changes; returns the exit code."""
    _set_up_process()
    words = sys.argv[1:]
    watch = Watch()
    watch.print_result = partial(_print_interrupted, as_json="--json" in words, out=sys.stdout)
    watch.start()
    try:
        code = _run_command_line(words, watch)
    except BrokenPipeError:
        # Otherwise the interpreter prints an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = Exit.SOLVED
    if watch.was_pressed or abandoned_calls_are_running():
        exit_now(code)
    return code


def _run_command_line(words: list[str], watch: Watch) -> int:
    """Run the command, and turn user errors into exit codes."""
    run: Callable[[], int]
    if words[:1] == [EXPLAIN]:
        run, as_json = partial(explain.main, words[1:]), "--json" in words
    else:
        try:
            arguments = parse(words)
        except UsageError as error:
            return _print_error(Exit.USAGE, str(error), as_json=False)
        run, as_json = partial(_run, arguments, watch), arguments.json
    # `out` is stdout as it is now: while a model file is loaded, sys.stdout is redirected.
    watch.print_result = partial(_print_interrupted, as_json=as_json, out=sys.stdout)
    try:
        with silenced():  # `Progress` says what runs
            return run()
    except (UsageError, BudgetError, DeviceError, SizeError) as error:
        return _print_error(Exit.USAGE, str(error), as_json=as_json)
    except (LoadError, FormatError, GraphError) as error:
        return _print_error(Exit.NOT_LOADED, str(error), as_json=as_json)
    except KeyboardInterrupt:
        return watch.print_last(partial(_print_interrupted, as_json=as_json))


def _set_up_process() -> None:
    """Change settings of the whole process: stdout, and how often garbage is collected."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # C code writes to descriptor 1 (HiGHS sometimes prints a line despite its settings), which
        # must not end up in the report or the JSON object. So sys.stdout gets a new descriptor, and
        # 1 becomes stderr. backslashreplace: a character that the terminal cannot encode must not
        # end the report.
        is_line_buffered = sys.stdout.line_buffering
        stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
        stdout.reconfigure(line_buffering=is_line_buffered)
        sys.stdout = stdout
        os.dup2(2, 1)
    # Importing PyTorch creates a million objects that are never freed. Searching them for garbage
    # took a sixth of the time of a small problem.
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)


def _print_error(code: Exit, message: str, *, as_json: bool, out: TextIO | None = None) -> int:
    """Print one line on stderr, and with --json an object on stdout (`out`); returns `code`."""
    line = " ".join(message.split())
    print(f"solve: {line}", file=sys.stderr)
    if as_json:
        answer = {"status": "error", "error": line, "exit_code": int(code)}
        print(json.dumps(answer), file=out, flush=True)
    return code


_print_interrupted = partial(_print_error, Exit.INTERRUPTED, "interrupted")


def _check_fits_problem(arguments: Arguments, graph: Graph) -> None:
    """Raise UsageError or BudgetError for options that do not suit this step."""
    resident_bytes = graph.resident_bytes
    reject_missing_unit(arguments.budget, resident_bytes=resident_bytes)
    reject_missing_unit(arguments.host, resident_bytes=resident_bytes, what="host budget")
    disk = (arguments.disk or "").partition(":")[0]
    reject_missing_unit(disk, resident_bytes=resident_bytes, what="disk budget")
    if arguments.emit is not None:
        if made_with := graph.meta.rewrites:
            raise UsageError(
                f"--emit {arguments.emit}: the graph was made with {', '.join(made_with)}, and "
                "other systems run the plain step; write its graph file with --rewrites none"
            )
        try:
            layers(graph)
        except NoLayersError as error:
            raise UsageError(f"--emit {arguments.emit}: {error}") from error


def _run(arguments: Arguments, watch: Watch) -> int:
    """Plan, write files, print the report. After each step `watch.print_result` is replaced."""
    progress = Progress(quiet=arguments.quiet)
    printer = _ReportPrinter(is_off=arguments.json or arguments.quiet)
    with open_problem(arguments, progress) as problem:
        _check_fits_problem(arguments, problem.graph)
        with ctrl_c_ends_searches() as interrupt:  # a plan found so far is still saved
            if arguments.largest is not None:
                on_fit = partial(_note_fit, arguments, watch, printer)
                problem, search = find_largest(arguments, problem, progress, on_fit=on_fit)
                is_configuration = arguments.problem.startswith(CONFIGURATION)
                report = _largest_report(problem, search, progress, knows_longest=is_configuration)
            else:
                report = _plan(arguments, problem, progress)
            watch.print_result = partial(_print_result, arguments, report, printer)
            report = _write_files(arguments, report, problem.stages)
            watch.print_result = partial(_print_result, arguments, report, printer)
            if not interrupt.is_set():
                advice = advise(report.best, reader=OF_THE_COMMAND)
                report = dataclasses.replace(report, advice=advice)
            report = dataclasses.replace(report, interrupted=interrupt.is_set())
        for later_output in outputs.LATER_OUTPUTS:
            if not (options := arguments.given_flags(*later_output.options)):
                continue
            watch.print_result = partial(
                _print_result, arguments, later_output.without(report, options), printer
            )
            try:
                if later_output.takes_minutes or report.interrupted:
                    _print_so_far(report, printer, watch)
                if report.interrupted and not later_output.is_short:
                    raise KeyboardInterrupt
                report = later_output.make(arguments, problem, report, progress)
                if later_output.takes_minutes:
                    _print_so_far(report, printer, watch)
            except KeyboardInterrupt:
                report = later_output.without(report, options)
    with ctrl_c_ends_searches():  # Ctrl-C no longer stops the report
        return watch.print_last(partial(_print_result, arguments, report, printer))


def _note_fit(arguments: Arguments, watch: Watch, printer: _ReportPrinter, size: int) -> None:
    """Note the largest size found to fit so far, to be printed if Ctrl-C prevents the report."""
    assert arguments.largest is not None
    message = f"interrupted; the largest {SIZE_WORDS[arguments.largest]} found to fit is {size}"
    watch.print_result = partial(
        _print_error, Exit.INTERRUPTED, message, as_json=arguments.json, out=printer.out
    )


def _print_so_far(report: Report, printer: _ReportPrinter, watch: Watch) -> None:
    """Print the report so far; raises KeyboardInterrupt afterwards if Ctrl-C came meanwhile."""
    with watch.printing(), ctrl_c_ends_searches() as interrupt:
        printer.show(report)
    if interrupt.is_set():
        raise KeyboardInterrupt


def _print_result(arguments: Arguments, report: Report, printer: _ReportPrinter) -> int:
    """Print the part of the report that has not been printed yet; returns the exit code."""
    code = exit_code(report)
    if arguments.json:
        answer = {**to_json(report), "exit_code": int(code)}
        print(json.dumps(answer, indent=1, allow_nan=False), file=printer.out, flush=True)
    printer.show(report)
    if report.verification is not None:
        for line in report.verification.warnings:
            print(f"solve: warning: --verify: {line}", file=sys.stderr)
    if code is not Exit.SOLVED:
        words = error_line(code, report, of_what=failing_stage(arguments, report.best))
        print(f"solve: {words}", file=sys.stderr)
    return code


class _ReportPrinter:
    """Prints the report on stdout: the first time all of it, later only what was added."""

    def __init__(self, *, is_off: bool) -> None:
        # Keep the present stdout: while the problem is open, sys.stdout is redirected to stderr.
        self.out = sys.stdout
        self._console = Console(file=self.out, highlight=False, emoji=False, markup=False)
        self._is_off = is_off
        self._shown: Report | None = None

    def show(self, report: Report) -> None:
        if self._is_off:
            return
        if self._shown is None:
            terminal.show(report, self._console)
        else:
            terminal.show_added(report, self._shown, self._console)
        self._shown = report


def _plan(arguments: Arguments, problem: Problem, progress: Progress) -> Report:
    """Search with every method, unless the problem has a plan already.

    After Ctrl-C the report has the best plan so far; raises KeyboardInterrupt if there is none.
    """
    if problem.planned is not None:
        return _solution_report(problem, problem.planned, progress)
    solutions: list[Solution] = []
    refused: list[tuple[str, str]] = []
    interrupted = False
    for method in arguments.methods:
        request = dataclasses.replace(problem.request, method=method)
        what = f"searching with {method} ({counted(len(problem.graph.nodes), 'op')})"
        try:
            with progress.showing(what), ctrl_c_ends_searches() as interrupt:
                solution = attempt(problem.step, request, thorough=True)
        except (TooLargeError, MissingSolverError) as error:  # the method cannot plan this graph
            if len(arguments.methods) == 1:
                raise UsageError(f"--method {method}: {error}") from error
            refused.append((method, str(error)))
        else:
            if solution.schedule is not None or not solution.interrupted:
                solutions.append(solution)
        interrupted = interrupt.is_set()
        if interrupted:
            break
    found = bool(solutions) and best(solutions).schedule is not None
    if interrupted and not found:
        raise KeyboardInterrupt
    if not interrupted:
        bound_s = max(solution.lower_bound_s for solution in solutions)
        solutions = [solution.with_bound(bound_s) for solution in solutions]
        if not found:
            solutions[0], interrupted = _with_obstacle(solutions[0], progress)
    notes = ["Interrupted: the best plan found so far." if found else _NO_MINIMUM]
    return _report(
        problem,
        solutions,
        notes=notes if interrupted else [],
        refused=tuple(refused),
        interrupted=interrupted,
    )


_NO_MINIMUM = "Interrupted while searching for the minimum budget."


def _report(
    problem: Problem, solutions: Sequence[Solution], *, notes: Sequence[str] = (), **fields: Any
) -> Report:
    return Report(
        problem=problem.name,
        device=problem.device,
        costs=problem.costs,
        solutions=tuple(solutions),
        notes=(*problem.notes, *notes),
        reserve_reason=problem.reserve_reason,
        not_traced=problem.not_traced,
        **fields,
    )


def _largest_report(
    problem: Problem, search: SizeSearch, progress: Progress, *, knows_longest: bool
) -> Report:
    """The report of the largest size that fits, or of the smallest if none does."""
    chosen = search.largest or search.candidates[0]
    notes = ["Interrupted: the largest size found to fit so far."] if search.interrupted else []
    notes += size_notes(search, knows_longest=knows_longest)
    return _solution_report(
        problem,
        chosen.solution,
        progress,
        notes=notes,
        interrupted=search.interrupted,
        sizes=search,
    )


def _solution_report(
    problem: Problem,
    solution: Solution,
    progress: Progress,
    *,
    notes: Sequence[str] = (),
    interrupted: bool = False,
    **fields: Any,
) -> Report:
    """The report of one solution; if it has no schedule, the minimum budget is searched for."""
    solution, unexplained = _with_obstacle(solution, progress)
    if unexplained:
        notes = [_NO_MINIMUM, *notes]
    interrupted = interrupted or unexplained
    return _report(problem, [solution], notes=notes, interrupted=interrupted, **fields)


def _write_files(arguments: Arguments, report: Report, stages: Sequence[Solution]) -> Report:
    """Write schedule, snapshot and graph, before steps that may take long or be interrupted.

    stages: the plans of a pipeline's stages; each stage gets files of its own (empty: no pipeline).
    """
    files = list(report.files)
    all_fit = all(solution.schedule is not None for solution in stages or (report.best,))
    if arguments.output is not None and all_fit:
        for what, path, solution in _files_by_stage("schedule", arguments.output, report, stages):
            solution.save(path)
            files.append((what, path))
    if arguments.snapshot is not None and report.best.schedule is not None:
        write_snapshot(report.best, arguments.snapshot)
        files.append(("snapshot", arguments.snapshot))
    if arguments.graph_out is not None:
        for what, path, solution in _files_by_stage("graph", arguments.graph_out, report, stages):
            solution.graph.save(path)
            files.append((what, path))
    return dataclasses.replace(report, files=tuple(files))


def _files_by_stage(
    what: str, path: Path, report: Report, stages: Sequence[Solution]
) -> Iterator[tuple[str, Path, Solution]]:
    """Yield (title, file, plan) for each stage; without stages, for the report's plan.

    The title names the stage unless it is the reported one.
    """
    if not stages:
        yield what, path, report.best
    for stage, solution in enumerate(stages):
        is_reported = solution.graph is report.best.graph
        of_stage = path.with_name(f"{path.stem}.stage{stage}{path.suffix}")
        yield what if is_reported else f"{what} of stage {stage}", of_stage, solution


def _with_obstacle(solution: Solution, progress: Progress) -> tuple[Solution, bool]:
    """Add the reason and the minimum budget to a solution without a schedule.

    Also returns whether Ctrl-C ended the search for the minimum budget.
    """
    with progress.showing("searching for the minimum budget"), ctrl_c_ends_searches() as interrupt:
        return with_obstacle(solution), interrupt.is_set()
