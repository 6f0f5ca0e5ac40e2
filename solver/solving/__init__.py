"""From a model or graph and a budget in bytes to a simulated Solution."""

from solver.solving.disk import disk_behind
from solver.solving.entry_point import solve
from solver.solving.solve_request import (
    KEPT_SHARE,
    NoPlainStepError,
    answer,
    attempt,
    explained,
    without_rewrites,
)
