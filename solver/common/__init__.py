"""Sizes, deadlines, number formatting and errors that every other part uses."""

from solver.common.deadline import (
    KEPT_SHARE,
    NEVER,
    Deadline,
    OutOfTimeError,
    check_time_limit,
    now_s,
)
from solver.common.errors import UsageError
from solver.common.format import counted, format_percent, format_share, format_time
from solver.common.sizes import (
    CUDA_RESERVE_BYTES,
    BudgetError,
    format_both,
    format_size,
    parse_size,
    refuse_bare,
)

__all__ = [
    "CUDA_RESERVE_BYTES",
    "KEPT_SHARE",
    "NEVER",
    "BudgetError",
    "Deadline",
    "OutOfTimeError",
    "UsageError",
    "check_time_limit",
    "counted",
    "format_both",
    "format_percent",
    "format_share",
    "format_size",
    "format_time",
    "now_s",
    "parse_size",
    "refuse_bare",
]
