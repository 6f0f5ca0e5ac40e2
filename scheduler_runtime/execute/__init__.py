"""Run a schedule: generated code, autograd functions, stock checkpoints, CUDA graphs."""

from scheduler_runtime.execute.autograd import program_of_output
from scheduler_runtime.execute.bound_program import BoundProgram
from scheduler_runtime.execute.called_losses import ForwardWithChunkedLoss
from scheduler_runtime.execute.copies import Pools
from scheduler_runtime.execute.copy_streams import (
    CopyEvent,
    CopyStreams,
    host_memory,
    storage_bytes,
    streams_for,
)
from scheduler_runtime.execute.cuda_graph import CudaGraphError
from scheduler_runtime.execute.host_values import forget_value, is_stand_in, stand_in_for
from scheduler_runtime.execute.module_part import module_schedule
from scheduler_runtime.execute.out_of_memory import is_out_of_memory
from scheduler_runtime.execute.program import Program, build_program
from scheduler_runtime.execute.random_state import recompute_random, run_and_keep_state
from scheduler_runtime.execute.replaced_forward import (
    ReplacedForward,
    restore_forward,
    without_plans,
)
from scheduler_runtime.execute.restart_step import (
    ArrivedGradients,
    OtherPrograms,
    ProgramFinder,
    RestartableStep,
    Shortage,
    drop_frames,
    restart_copy_bytes,
)
from scheduler_runtime.execute.saved_on_host import CallsOnHost, ForwardWithHooks
from scheduler_runtime.execute.sequential_segments import SegmentedForward, runs_in_a_loop
from scheduler_runtime.execute.step_program import StepProgram
from scheduler_runtime.execute.torch_checkpoint import (
    CheckpointedForward,
    ExportedForward,
    SavedCalls,
    checkpointed_as_whole,
    exports_in,
    functional_name,
    has_checkpoints,
    names_inside,
    operator_named,
    remove_torch_checkpoint,
)
from scheduler_runtime.execute.without_dispatch_modes import (
    WatchingMode,
    no_watching_modes,
)
