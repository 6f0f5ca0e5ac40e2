"""The groups of parameters that FSDP2 gathers together, and where in the step each group runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphs.fsdp.spec import (
    ELEMENT_BYTES,
    ShardingError,
    accumulates_in_reduce_dtype,
    shard_rows,
)
from graphs.graph import Graph, Node, is_under

ROOT = ""
"""The path of the model itself, whose group has the parameters that are in no other group."""


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter and its shards.

    path: its name in the model.
    tensor: its tensor in the graph.
    stored_bytes, gathered_bytes, reduced_bytes: bytes of each rank's shard, including padding, in
        three dtypes: the one it is stored in, the one it is gathered in (gradients are computed in
        it, too), and the one gradients are reduced in.
    gradient: the tensor that holds its whole gradient; None: it has none.
    is_gradient_cast: whether that tensor is in the dtype it is reduced in, or in the one it is
        computed in.
    is_even: whether its number of rows is a multiple of the number of ranks.
    n_sums: tensor-parallel ranks over which its gradient still has to be summed (1: none).
    is_cast: whether its shard is cast before it is gathered.
    """

    path: str
    tensor: str
    stored_bytes: int
    gathered_bytes: int
    reduced_bytes: int
    gradient: str | None
    is_even: bool
    n_sums: int = 1
    is_cast: bool = False
    is_gradient_cast: bool = False

    @property
    def made_bytes(self) -> int:
        """Bytes of one rank's shard, including padding, in the dtype of its whole gradient."""
        return self.reduced_bytes if self.is_gradient_cast else self.gathered_bytes


@dataclass(frozen=True)
class Group:
    """A group: parameters that are gathered together.

    path: of the module that `fully_shard` is called on.
    first_forward, last_forward: positions of its first and last node among the forward nodes.
    first_backward, last_backward: positions of its first and last node among the later nodes (None:
        it has no backward).
    is_reduced_at_end: whether its gradients are reduced only at the end of the backward pass.
    gathered_bytes: bytes of one rank's shards as they are gathered.
    cast_bytes: the part of these that is cast before.
    reduced_bytes, gradient_bytes: bytes of one rank's shards of the gradients, as they are reduced
        and as they are stored.
    """

    path: str
    parameters: tuple[ShardedParameter, ...]
    first_forward: int
    last_forward: int
    first_backward: int | None
    last_backward: int | None
    is_reduced_at_end: bool

    @property
    def trained(self) -> tuple[ShardedParameter, ...]:
        return tuple(p for p in self.parameters if p.gradient is not None)

    @property
    def gathered_bytes(self) -> int:
        return sum(parameter.gathered_bytes for parameter in self.parameters)

    @property
    def cast_bytes(self) -> int:
        return sum(p.gathered_bytes for p in self.parameters if p.is_cast)

    @property
    def reduced_bytes(self) -> int:
        return sum(p.reduced_bytes for p in self.trained)

    @property
    def gradient_bytes(self) -> int:
        return sum(p.stored_bytes for p in self.trained)

    @property
    def casts_gradients(self) -> bool:
        """Whether gradients are stored in another dtype than they are reduced in."""
        return self.gradient_bytes != self.reduced_bytes


def read_parameters(
    graph: Graph, n_ranks: int, *, reduce_dtype: str | None = None
) -> list[ShardedParameter]:
    """The parameters of a traced step and their shards.

    reduce_dtype: the dtype that gradients are reduced in; None: that of the shards, or before torch
        2.15 the one that they are computed in.

    Raises ShardingError for scalars, and for a graph without `parameter_layout`.
    """
    layout = graph.meta.parameter_layout
    if not layout:
        raise ShardingError("the graph has no parameter_layout in its meta; trace the model again")
    is_stored_dtype = accumulates_in_reduce_dtype(graph.meta.environment)
    found = []
    for path, entry in layout.items():
        shape = tuple(entry["shape"])
        if not shape:
            raise ShardingError(
                f"parameter {path!r} is a scalar, which FSDP2 does not shard; give it the shape [1]"
            )
        n_elements = shard_rows(shape[0], n_ranks) * math.prod(shape[1:])
        computed_bytes = entry["element_bytes"]
        stored_bytes = entry.get("stored_element_bytes", computed_bytes)
        own_bytes = stored_bytes if is_stored_dtype else computed_bytes
        reduced_bytes = ELEMENT_BYTES[reduce_dtype] if reduce_dtype else own_bytes
        found.append(
            ShardedParameter(
                path=path,
                tensor=entry["tensor"],
                stored_bytes=n_elements * stored_bytes,
                gathered_bytes=n_elements * computed_bytes,
                reduced_bytes=n_elements * reduced_bytes,
                is_cast="stored_element_bytes" in entry,
                gradient=entry["gradient"],
                is_even=shape[0] % n_ranks == 0,
                n_sums=entry.get("n_sums", 1),
            )
        )
    return found


class GroupFinder:
    """Finds the groups (the root, and the modules at `paths`) and where each runs, forward and
    backward."""

    def __init__(self, graph: Graph, parameters: Sequence[ShardedParameter], paths: Sequence[str]):
        self._graph = graph
        self._paths = (ROOT, *dict.fromkeys(path for path in paths if path))
        self._owned: dict[str, list[ShardedParameter]] = {path: [] for path in self._paths}
        for parameter in parameters:
            inside = [p for p in self._paths if is_under(parameter.path, p)]
            self._owned[max(inside, key=len)].append(parameter)
        self._forward = graph.forward_nodes
        self._later = graph.later_nodes
        self._sums = set(graph.meta.gradient_sums)
        # trained parameters, and the forward tensors that depend on them: these get a gradient
        self._with_gradient = {p.tensor for p in parameters if p.gradient is not None}
        for node in self._forward:
            if not self._with_gradient.isdisjoint(node.inputs):
                self._with_gradient.update(node.outputs)

    def groups(self) -> list[Group]:
        """The groups that have parameters and run, in the order of `paths`, the root first.

        Raises ShardingError for a module that cannot be a group.
        """
        groups = (self._group(path) for path in self._paths if self._owned[path])
        return [group for group in groups if group is not None]

    def _group(self, path: str) -> Group | None:
        """The group of the module at this path; None if it does not run."""
        owned = self._owned[path]
        if path == ROOT:
            n_later = len(self._later)
            first = next((i for i, n in enumerate(self._later) if n.phase == "backward"), n_later)
            return Group(
                path,
                tuple(owned),
                0,
                len(self._forward) - 1,
                first,
                n_later - 1,
                is_reduced_at_end=True,
            )
        inside = [i for i, node in enumerate(self._forward) if is_under(node.module, path)]
        if not inside:
            return None
        self._check_group(path, inside)
        # its backward includes the nodes that make its gradients, whichever module they are in
        makers = {
            self._graph.producer[p.gradient].name
            for p in owned
            if p.gradient in self._graph.producer
        }
        later = [
            i
            for i, node in enumerate(self._later)
            if node.phase == "backward" and (is_under(node.module, path) or node.name in makers)
        ]
        made = {n for i in inside for n in self._forward[i].outputs}
        read = {n for i in inside for n in self._forward[i].inputs}
        own_tensors = {parameter.tensor for parameter in owned}
        return Group(
            path=path,
            parameters=tuple(owned),
            first_forward=inside[0],
            last_forward=inside[-1],
            first_backward=later[0] if later else None,
            last_backward=self._end_after_sums(later) if later else None,
            is_reduced_at_end=not (read - made - own_tensors) & self._with_gradient,
        )

    def _check_group(self, path: str, inside: Sequence[int]) -> None:
        """Raise ShardingError if the module runs several times or in several pieces, or another
        module reads its parameters.

        inside: positions of its forward nodes.
        """
        readers: dict[str, list[Node]] = {p.tensor: [] for p in self._owned[path]}
        for node in self._forward:
            for name in dict.fromkeys(node.inputs):
                if name in readers:
                    readers[name].append(node)
        is_in_pieces = inside[-1] - inside[0] + 1 != len(inside)
        if is_in_pieces or min(map(len, filter(None, readers.values())), default=1) > 1:
            raise ShardingError(
                f"module {path!r} runs several times in a step, which is not supported for a group "
                "of FSDP2; leave it out of the groups, so that it belongs to the root group"
            )
        for parameter in self._owned[path]:
            for node in readers[parameter.tensor]:
                if not is_under(node.module, path):
                    raise ShardingError(
                        f"parameter {parameter.path!r} of group {path!r} is read by {node.name!r} "
                        f"in module {node.module!r}, where FSDP2 has only shards of it; leave "
                        f"{path!r} out of the groups, so that it belongs to the root group"
                    )

    def _end_after_sums(self, later: Sequence[int]) -> int:
        """The position of the last node of a group's backward pass, including the nodes after it
        that sum gradients: autograd sums those of a group's inputs before it leaves the group.

        later: positions of the group's later nodes.
        """
        made = {name for i in later for name in self._later[i].outputs}
        end = later[-1]
        while end + 1 < len(self._later):
            node = self._later[end + 1]
            if node.name not in self._sums or made.isdisjoint(node.inputs):
                break
            made.update(node.outputs)
            end += 1
        return end
