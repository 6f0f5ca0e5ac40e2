"""The run: execute a Schedule inside a PyTorch module."""

from scheduler_runtime.apply import PlanMismatchError, apply, remove
from scheduler_runtime.measure import Measurement, measure
from scheduler_runtime.replan import ReplanError

__all__ = ["Measurement", "PlanMismatchError", "ReplanError", "apply", "measure", "remove"]
