"""Running a schedule: generated code, autograd functions, random state, checkpoints."""

from scheduler_runtime.execute.autograd import run_step
from scheduler_runtime.execute.program import Program, build_program
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state
from scheduler_runtime.execute.sequential_segments import put_segments, runs_in_a_loop
from scheduler_runtime.execute.torch_checkpoint import (
    CheckpointedForward,
    SavedCalls,
    functional_name,
    has_checkpoints,
    remove_torch_checkpoint,
)

__all__ = [
    "CheckpointedForward",
    "Program",
    "SavedCalls",
    "build_program",
    "functional_name",
    "has_checkpoints",
    "put_segments",
    "recompute_random",
    "remove_torch_checkpoint",
    "run_and_keep_state",
    "run_step",
    "runs_in_a_loop",
]
