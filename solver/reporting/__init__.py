"""Reports (terminal, JSON, HTML page) and memory snapshots; plots are in `plot`."""

from solver.reporting.copy_rows import copies_title, stall_rows, trip_rows
from solver.reporting.html import write_page
from solver.reporting.memory_rows import part
from solver.reporting.report_data import Report, best, describe_costs, step_notes, to_json
from solver.reporting.snapshot import write_snapshot
from solver.reporting.verification import Verification
