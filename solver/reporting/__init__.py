"""Reports: terminal tables, JSON, the HTML page. Plots are in `solver.reporting.plot`."""

from solver.reporting.api import draw, report, sweep, verify
from solver.reporting.html import write_page
from solver.reporting.rows import (
    Report,
    best,
    proven_infeasible,
    reached_least_budget_bytes,
    step_notes,
    to_json,
)
from solver.reporting.terminal import heading, pairs, written
from solver.reporting.wording import described, least_words, part

__all__ = [
    "Report",
    "best",
    "described",
    "draw",
    "heading",
    "least_words",
    "pairs",
    "part",
    "proven_infeasible",
    "reached_least_budget_bytes",
    "report",
    "step_notes",
    "sweep",
    "to_json",
    "verify",
    "write_page",
    "written",
]
