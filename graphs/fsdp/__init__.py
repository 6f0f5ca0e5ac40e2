"""A training step as one rank of FSDP2 runs it. Imports no torch."""

from graphs.fsdp.module_blocks import called_children, groups_of, is_container, listed_blocks
from graphs.fsdp.spec import (
    MixedPrecision,
    Sharding,
    ShardingError,
    shard_rows,
    sharding_of,
    sharding_words,
)
from graphs.fsdp.stage import sharded_stage, sharding_in_stage
from graphs.fsdp.transform import sharded
