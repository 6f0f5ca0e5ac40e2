"""The exit codes of the command, and the line on stderr that goes with each."""

from __future__ import annotations

from enum import IntEnum

from solver.reporting import Report
from solver.sizes_deadlines_progress import format_both


class Exit(IntEnum):
    """The exit codes of the command."""

    SOLVED = 0
    USAGE = 2
    INFEASIBLE = 3
    NOT_LOADED = 4
    NOT_VERIFIED = 5
    NOT_FOUND = 6
    INTERRUPTED = 130


def exit_code(report: Report) -> Exit:
    """The exit code of a command that ends with this report."""
    if report.best.schedule is not None:
        found = report.verification
        failed = report.verify_error or (found is not None and not found.passed)
        return Exit.NOT_VERIFIED if failed else Exit.SOLVED
    if report.interrupted:
        return Exit.INTERRUPTED
    proven = any(solution.proven_infeasible for solution in report.solutions)
    timed_out = any(solution.status == "time_limit" for solution in report.solutions)
    return Exit.NOT_FOUND if timed_out and not proven else Exit.INFEASIBLE


def error_line(code: Exit, report: Report, *, of_what: str = "") -> str:
    """The line on stderr for a report without a schedule, or with a failed verification.

    of_what: what has no schedule, if it is not the whole step (" of stage 0").
    """
    solution = report.best
    budget = format_both(solution.request.budget_bytes)
    if code is Exit.NOT_VERIFIED:
        if report.verification is None:
            return f"--verify: {report.verify_error}"
        if report.verification.memory_failures:
            return f"--verify: {report.verification.memory_failures[0]}"
        what = {
            "bitwise": "not bitwise identical",
            "allclose": "not as close to float64 as promised",
            "lossy": "results differ by more than rounded gradients",
        }[report.verification.results]
        return f"--verify: {what}: {report.verification.differences[0]}"
    if code is Exit.INTERRUPTED:
        return f"interrupted; what is known so far of {budget} is in the report"
    if code is Exit.NOT_FOUND:
        line = f"nothing found{of_what} for {budget} within the time limit"
        return f"{line}; extend it with --time-limit" + solution.obstacle_text
    line = f"infeasible: no schedule{of_what} fits {budget}"
    if not any(s.proven_infeasible for s in report.solutions):
        line = f"infeasible: method {solution.method} finds no schedule{of_what} that fits {budget}"
    return line + solution.obstacle_text
