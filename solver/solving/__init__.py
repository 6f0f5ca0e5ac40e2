"""From a model or graph and a budget in bytes to a simulated Solution."""

from solver.solving.answering import (
    KEPT_SHARE,
    NoPlainStepError,
    answer,
    attempt,
    explained,
    without_rewrites,
)
from solver.solving.asking import solve
