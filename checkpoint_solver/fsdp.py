"""Planning and sharding for FSDP2 (from `graphs.fsdp` and `scheduler_runtime.fsdp`)."""

from graphs.fsdp import MixedPrecision, Sharding, ShardingError, sharded
from scheduler_runtime.fsdp import shard

__all__ = ["MixedPrecision", "Sharding", "ShardingError", "shard", "sharded"]
