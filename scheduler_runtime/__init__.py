"""The run: execute a Schedule inside a PyTorch module."""

from scheduler_runtime.apply import CudaGraphError, PlanMismatchError, apply, remove
from scheduler_runtime.budgeted import CompileReport, compile, compile_reports, uncompile
from scheduler_runtime.compile_loop import GraphBreakError
from scheduler_runtime.fit import FitError, Fitted, fit, plans_of
from scheduler_runtime.foreign_checkpoints import CheckpointedAlreadyError
from scheduler_runtime.measure import Measurement, measure
from scheduler_runtime.replan import ReplanError

__all__ = [
    "CheckpointedAlreadyError",
    "CompileReport",
    "CudaGraphError",
    "FitError",
    "Fitted",
    "GraphBreakError",
    "Measurement",
    "PlanMismatchError",
    "ReplanError",
    "apply",
    "compile",
    "compile_reports",
    "fit",
    "measure",
    "plans_of",
    "remove",
    "uncompile",
]
