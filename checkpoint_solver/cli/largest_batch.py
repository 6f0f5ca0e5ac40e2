"""`--max-batch` and `--max-seq`: find the largest size whose plan fits.

The model file is traced and planned quickly at one size after another, then thoroughly at the
largest that fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from checkpoint_solver.cli.arguments import Arguments
from checkpoint_solver.cli.model_source import LoadError
from checkpoint_solver.cli.problem import Problem
from checkpoint_solver.cli.progress import Progress
from checkpoint_solver.cli.usage import UsageError
from solver.methods import METHODS, MissingSolverError, TooLargeError
from solver.plan_analysis import (
    Candidate,
    SameStepError,
    SizeNotTraceableError,
    SizeSearch,
    largest,
)
from solver.schedule import Solution
from solver.sizes_deadlines_progress import ctrl_c_ends_searches, ctrl_c_raises
from solver.solving import attempt, with_obstacle

OPTIONS = {"batch_size": "--max-batch", "seq_length": "--max-seq"}
SIZE_WORDS = {"batch_size": "batch", "seq_length": "sequence"}


def find_largest(
    arguments: Arguments, problem: Problem, progress: Progress, *, on_fit: Callable[[int], None]
) -> tuple[Problem, SizeSearch]:
    """Find the largest size that fits; returns the problem at that size, and the search.

    If no size fits, it is the problem at the smallest size tried.

    problem: the problem traced at the first size.
    on_fit: called with each size that is the largest found to fit so far.

    Raises UsageError, LoadError, and KeyboardInterrupt if Ctrl-C comes before a size has fitted.
    """
    name, resize = arguments.largest, problem.resized
    assert name is not None
    assert resize is not None
    assert problem.size is not None
    first = problem.size
    problems = {first: problem}
    request = dataclasses.replace(problem.request, method=arguments.methods[0])

    def plan(size: int) -> Solution:
        if size not in problems:
            try:
                with ctrl_c_raises():  # tracing checks no deadline
                    problems[size] = resize(size)
            except LoadError as error:
                raise SizeNotTraceableError(str(error)) from error
        if (planned := problems[size].planned) is not None:
            return planned
        found = attempt(problems[size].step, request, quick=True)
        if found.proven_infeasible or not METHODS[request.method].reaches_least_budget:
            return found
        return with_obstacle(found)

    largest_fit = 0

    def note_candidate(found: Candidate) -> None:
        nonlocal largest_fit
        fits = found.solution.schedule is not None
        if fits and found.size > largest_fit:
            largest_fit = found.size
            on_fit(largest_fit)
        say(f"{found.size} {'fits' if fits else 'does not fit'}")

    what = f"searching for the largest {SIZE_WORDS[name]}"
    try:
        with progress.showing(what, always=True) as say, ctrl_c_ends_searches():
            search = largest(plan, size=name, first=first, on_candidate=note_candidate)
            chosen = search.largest or search.candidates[0]
            quick, start = problems[chosen.size], chosen.solution.schedule
            if start is not None and not search.interrupted:
                if quick.planned is None and chosen.solution.status == "feasible":
                    say(f"planning {chosen.size} thoroughly")
                    thorough = attempt(quick.step, request, starts=[start])
                    search = search.with_solution(chosen.size, thorough)
                elif quick.thorough is not None:
                    say(f"planning {chosen.size} thoroughly")
                    with ctrl_c_raises():  # it traces first
                        found = quick.thorough()
                    if found.planned is not None and found.slowest_s <= quick.slowest_s:
                        problems[chosen.size] = found
                        search = search.with_solution(chosen.size, found.planned)
    except SameStepError as error:
        raise UsageError(f"{OPTIONS[name]}: {error}; see get_batch of {problem.name}") from error
    except (TooLargeError, MissingSolverError) as error:
        raise UsageError(f"--method {arguments.methods[0]}: {error}") from error
    return problems[chosen.size], search


def size_notes(search: SizeSearch, *, knows_longest: bool) -> Iterator[str]:
    """Sentences about the search for the report.

    knows_longest: sequences longer than the model supports are refused, so no warning is needed.
    """
    if late := [str(c.size) for c in search.candidates if c.solution.timed_out]:
        yield f"The time limit ended the search for size {', '.join(late)}."
    if search.refused:
        size, reason = search.refused[0]
        yield f"Size {size} could not be traced: {reason}."
    if search.size == "seq_length" and search.largest is not None and not knows_longest:
        yield (
            "Tracing does not check whether the model supports sequences of this length: its table "
            "of positions may be shorter."
        )
