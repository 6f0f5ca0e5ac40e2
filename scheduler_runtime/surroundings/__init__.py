"""What is around a planned module: free device memory, DDP, the model's own checkpointing."""

from scheduler_runtime.surroundings.data_parallel import Buckets, buckets_of, why_not_planned
from scheduler_runtime.surroundings.free_memory import (
    budget_on,
    memory_now,
    no_auto,
    size_on,
    step_bytes_now,
)
from scheduler_runtime.surroundings.own_checkpointing import (
    CheckpointedAlreadyError,
    no_checkpoints,
    refuse_checkpointing,
)

__all__ = [
    "Buckets",
    "CheckpointedAlreadyError",
    "buckets_of",
    "budget_on",
    "memory_now",
    "no_auto",
    "no_checkpoints",
    "refuse_checkpointing",
    "size_on",
    "step_bytes_now",
    "why_not_planned",
]
