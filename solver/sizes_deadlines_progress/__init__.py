"""Shared helpers: sizes and number formats, deadlines, interruptible C calls, progress messages."""

from solver.sizes_deadlines_progress.c_calls import (
    abandoned_calls_are_running,
    end_idle_workers,
    interruptible,
    run_in_parallel,
)
from solver.sizes_deadlines_progress.cli_or_python_wording import IN_PYTHON, OF_THE_COMMAND, Reader
from solver.sizes_deadlines_progress.deadline import (
    NEVER,
    Deadline,
    OutOfTimeError,
    check_time_limit,
    ctrl_c_ends_searches,
    ctrl_c_raises,
    interrupted,
    now_s,
)
from solver.sizes_deadlines_progress.format import (
    counted,
    describe_op,
    describe_type,
    format_percent,
    format_share,
    format_time,
)
from solver.sizes_deadlines_progress.misspelt_arguments import check_names, names_checked
from solver.sizes_deadlines_progress.progress_in_logs import Say, log_progress
from solver.sizes_deadlines_progress.progress_in_python import silenced, tell, telling
from solver.sizes_deadlines_progress.sizes import (
    CUDA_RESERVE_BYTES,
    BudgetError,
    Rates,
    UnknownCapacityError,
    format_both,
    format_size,
    format_size_up,
    parse_budget,
    parse_rate,
    parse_rates,
    parse_size,
    reject_missing_unit,
    reject_share,
)
