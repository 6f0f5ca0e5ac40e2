"""Running a schedule: generated code, autograd functions, checkpoints, CUDA graphs."""

from scheduler_runtime.execute.bound_program import BoundProgram, StepProgram
from scheduler_runtime.execute.cuda_graph import CudaGraphError
from scheduler_runtime.execute.program import Program, build_program
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state
from scheduler_runtime.execute.replaced_forward import ReplacedForward, restore_forward
from scheduler_runtime.execute.sequential_segments import SegmentedForward, runs_in_a_loop
from scheduler_runtime.execute.torch_checkpoint import (
    CheckpointedForward,
    ExportedForward,
    SavedCalls,
    functional_name,
    has_checkpoints,
    names_inside,
    remove_torch_checkpoint,
)

__all__ = [
    "BoundProgram",
    "CheckpointedForward",
    "CudaGraphError",
    "ExportedForward",
    "Program",
    "ReplacedForward",
    "SavedCalls",
    "SegmentedForward",
    "StepProgram",
    "build_program",
    "functional_name",
    "has_checkpoints",
    "names_inside",
    "recompute_random",
    "remove_torch_checkpoint",
    "restore_forward",
    "run_and_keep_state",
    "runs_in_a_loop",
]
