"""Sizes, deadlines, number formats, progress lines, and C code that Ctrl-C can end."""

from solver.common.argument_names import check_names, names_checked
from solver.common.c_calls import calls_are_left, end_idle_calls, interruptible
from solver.common.deadline import (
    NEVER,
    Deadline,
    OutOfTimeError,
    check_time_limit,
    ctrl_c_ends_searches,
    ctrl_c_raises,
    interrupted,
    now_s,
)
from solver.common.format import counted, describe_op, format_percent, format_share, format_time
from solver.common.long_stages import Say, now_and_then
from solver.common.reader import IN_PYTHON, OF_THE_COMMAND, Reader
from solver.common.sizes import (
    CUDA_RESERVE_BYTES,
    BudgetError,
    format_both,
    format_size,
    format_size_up,
    parse_budget,
    parse_rate,
    parse_size,
    reject_missing_unit,
    reject_share,
)
from solver.common.what_runs import tell, telling, telling_in_lines, untold
