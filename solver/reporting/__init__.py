"""Reports: terminal tables, JSON, the HTML page. Plots are in `solver.reporting.plot`."""

from solver.reporting.api import draw, report, sweep, verify
from solver.reporting.html import write_page
from solver.reporting.rows import (
    Report,
    best,
    describe_costs,
    step_notes,
    to_json,
)
from solver.reporting.terminal import heading, pairs, written
from solver.reporting.wording import part

__all__ = [
    "Report",
    "best",
    "describe_costs",
    "draw",
    "heading",
    "pairs",
    "part",
    "report",
    "step_notes",
    "sweep",
    "to_json",
    "verify",
    "write_page",
    "written",
]
