"""From a model or graph and a budget in bytes to a simulated Solution."""

from solver.solving.answers import time_s
from solver.solving.disk import disk_directory, given_rates, with_disk
from solver.solving.entry_point import check_options, request_for, solve
from solver.solving.problem import as_step, traced_for_device
from solver.solving.solve_request import (
    KEPT_SHARE,
    NoPlainStepError,
    answer,
    attempt,
    for_stock_modules,
    with_obstacle,
)
from solver.solving.state_choices import check_where, with_state_choices
