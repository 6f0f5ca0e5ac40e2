"""A module with a plan: its programs by kind of call, guards, mismatches, replanning."""

from scheduler_runtime.planned.cuda_graph import CudaGraphError, Recorded, Recordings, check_model
from scheduler_runtime.planned.forward import ForwardReplacement, module_schedule, refuse_second
from scheduler_runtime.planned.mismatch import (
    check_arguments,
    environment_difference,
    forms_difference,
    graph_difference,
)
from scheduler_runtime.planned.plan import AnyPlan, Plan, check_module, check_order
from scheduler_runtime.planned.program_cache import BoundProgram, StepProgram
from scheduler_runtime.planned.replanning import ReplanError, replan

__all__ = [
    "AnyPlan",
    "BoundProgram",
    "CudaGraphError",
    "ForwardReplacement",
    "Plan",
    "Recorded",
    "Recordings",
    "ReplanError",
    "StepProgram",
    "check_arguments",
    "check_model",
    "check_module",
    "check_order",
    "environment_difference",
    "forms_difference",
    "graph_difference",
    "module_schedule",
    "refuse_second",
    "replan",
]
