"""The run: execute a Schedule inside a PyTorch module."""

from scheduler_runtime.applying import CudaGraphError, PlanMismatchError, apply, remove
from scheduler_runtime.compiler import (
    CompileReport,
    GraphBreakError,
    compile,
    compile_reports,
    uncompile,
)
from scheduler_runtime.fitting import FitError, Fitted, attempt, fit, plan_ahead, plans_of
from scheduler_runtime.host_memory import parameters_on_device
from scheduler_runtime.measuring import Measurement, measure
from scheduler_runtime.pipeline_steps import steps_together
from scheduler_runtime.planned import ReplanError
from scheduler_runtime.ranks import RanksDisagreeError, on_all_ranks
from scheduler_runtime.surroundings import CheckpointedAlreadyError
from scheduler_runtime.verifying import verify

__all__ = [
    "CheckpointedAlreadyError",
    "CompileReport",
    "CudaGraphError",
    "FitError",
    "Fitted",
    "GraphBreakError",
    "Measurement",
    "PlanMismatchError",
    "RanksDisagreeError",
    "ReplanError",
    "apply",
    "attempt",
    "compile",
    "compile_reports",
    "fit",
    "measure",
    "on_all_ranks",
    "parameters_on_device",
    "plan_ahead",
    "plans_of",
    "remove",
    "steps_together",
    "uncompile",
    "verify",
]
