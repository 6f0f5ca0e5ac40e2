"""How FSDP2 shards a step, and the sharding that a graph or a plan was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ShardingError(ValueError):
    """The step cannot be sharded this way; says why."""


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 is applied.

    n_ranks: number of devices.
    groups: paths of the modules that `fully_shard` is called on, in the model's order, before the
        model itself; None: the model's blocks (`graphs.fsdp.module_blocks.default_groups`).
    """

    n_ranks: int
    groups: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.n_ranks, bool) or not isinstance(self.n_ranks, int) or self.n_ranks < 2:
            raise ShardingError(f"n_ranks is {self.n_ranks!r}; a whole number of at least 2")
        if isinstance(self.groups, str):
            raise ShardingError(f"groups is {self.groups!r}; a sequence of module paths")
        if self.groups is not None:
            object.__setattr__(self, "groups", tuple(self.groups))


def shard_rows(n_rows: int, n_ranks: int) -> int:
    """Rows of the largest shard, to which FSDP2 pads the others."""
    return -(-n_rows // n_ranks)


def sharding_of(environment: Mapping[str, Any]) -> Sharding | None:
    """The sharding in the environment of a graph or plan; None: the step is not sharded."""
    found = environment.get("sharding")
    if not isinstance(found, Mapping):
        return None
    return Sharding(n_ranks=found.get("n_ranks", 0), groups=tuple(found.get("groups", ())))


def sharding_words(environment: Mapping[str, Any]) -> str:
    """ "per rank of 8, FSDP2"; "" for a step that is not sharded."""
    sharding = sharding_of(environment)
    return "" if sharding is None else f"per rank of {sharding.n_ranks}, FSDP2"
