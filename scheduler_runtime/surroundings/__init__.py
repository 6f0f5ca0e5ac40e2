"""What surrounds a planned module: free device memory, DDP, the model's own checkpointing."""

from scheduler_runtime.surroundings.data_parallel import Buckets, buckets_of, why_not_planned
from scheduler_runtime.surroundings.free_memory import (
    budget_on,
    free_budget_bytes,
    refuse_auto_budget,
    size_on,
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
    "free_budget_bytes",
    "no_checkpoints",
    "refuse_auto_budget",
    "refuse_checkpointing",
    "size_on",
    "why_not_planned",
]
