"""The run: execute a Schedule inside a PyTorch module."""

from scheduler_runtime.apply import PlanMismatchError, apply, remove
from scheduler_runtime.checkpoints import CheckpointedAlreadyError
from scheduler_runtime.fit import FitError, Fitted, fit, plans_of
from scheduler_runtime.measure import Measurement, measure
from scheduler_runtime.replan import ReplanError

__all__ = [
    "CheckpointedAlreadyError",
    "FitError",
    "Fitted",
    "Measurement",
    "PlanMismatchError",
    "ReplanError",
    "apply",
    "fit",
    "measure",
    "plans_of",
    "remove",
]
