"""Planning and sharding for FSDP2, of `graphs.fsdp` and `scheduler_runtime.fsdp`."""

from graphs.fsdp import Sharding, ShardingError, sharded
from scheduler_runtime.fsdp import shard

__all__ = ["Sharding", "ShardingError", "shard", "sharded"]
