"""Collectives in a traced step: how many bytes they handle, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from graphs.costs.operators import OpCall, tensors_in
from graphs.hardware import Link, all_gather_s, all_reduce_s, reduce_scatter_s
from graphs.model_calls import named_arguments

_NAMESPACES = ("_c10d_functional", "c10d_functional", "c10d", "_dtensor")
_WAIT = "_c10d_functional.wait_tensor.default"


def is_collective(target: object) -> bool:
    """Whether all ranks of a group have to call this operator together."""
    return getattr(target, "namespace", "") in _NAMESPACES and not is_wait(target)


def is_wait(target: object) -> bool:
    """Whether this operator waits for a collective to finish and returns the tensor it filled."""
    return str(target) == _WAIT


@dataclass(frozen=True)
class Collective:
    """One collective call.

    kind: the operator's name, such as "all_reduce".
    n_bytes: bytes of the whole tensor: what it reads or what it writes, whichever is more.
    n_ranks: ranks in its process group.
    """

    kind: str
    n_bytes: int
    n_ranks: int

    @classmethod
    def of(cls, call: OpCall) -> Collective | None:
        """The collective that this call runs; None if it is no collective."""
        if not is_collective(call.target):
            return None
        given = named_arguments(call.target, call.args, call.kwargs)
        if (n_ranks := _n_ranks(given)) is None:
            return None  # it wraps the result of one
        name = call.packet.__name__.rstrip("_").removesuffix("_coalesced").removesuffix("_out")
        n_bytes = max(
            sum(tensor.nbytes for tensor in tensors_in(side))
            for side in (*given.values(), call.value)
        )
        return cls(_KINDS.get(name, name), n_bytes, n_ranks)

    def time_s(self, link: Link) -> float:
        """Seconds over this link. An operator without a formula counts as an all-reduce, which
        sends the most."""
        return _TIMES.get(self.kind, all_reduce_s)(self.n_bytes, n_ranks=self.n_ranks, link=link)

    @property
    def gloo_workspace_bytes(self) -> int:
        """Bytes that gloo allocates besides: it all-gathers into a list of tensors, and
        reduce-scatters a copy of the input."""
        return self.n_bytes if self.kind in (_ALL_GATHER, _REDUCE_SCATTER) else 0


def _n_ranks(given: Mapping[str, Any]) -> int | None:
    """The size of the group that a collective is given; None if it is given none. The functions of
    torch.distributed pass a group itself, functional collectives its name."""
    if (group := given.get("process_group")) is not None:
        return int(dist.ProcessGroup.unbox(group).size())
    name = given.get("group_name")
    return None if name is None else distributed_c10d._get_group_size_by_name(name)


_ALL_GATHER, _REDUCE_SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
_KINDS = {
    "allgather": _ALL_GATHER,
    "_allgather_base": _ALL_GATHER,
    "allgather_into_tensor": _ALL_GATHER,
    "reduce_scatter": _REDUCE_SCATTER,
    "_reduce_scatter_base": _REDUCE_SCATTER,
    "alltoall": "all_to_all_single",
    "alltoall_base": "all_to_all_single",
}
"""Operators of torch.distributed's functions -> the functional collective that does the same."""
_TIMES: Mapping[str, Callable[..., float]] = {
    _ALL_GATHER: all_gather_s,
    _REDUCE_SCATTER: reduce_scatter_s,
    "all_to_all_single": reduce_scatter_s,  # n - 1 of n parts leave each rank, too
    "shard_dim_alltoall": reduce_scatter_s,
    "broadcast": all_gather_s,
}
