"""The fields of a graph, and quantities that are derived from them once and looked up often."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from graphs.graph.meta import GraphMeta
from graphs.graph.parts import Node, Tensor


@dataclass(frozen=True)
class Lookups:
    """The fields of a `graphs.graph.Graph`.

    nodes: in the order in which the framework runs them; forward, outside, backward, optimizer.
    tensors: all that nodes read or write. Those that no node outputs are resident.
    outputs: tensors that are live at the end of the step.
    meta: see `GraphMeta`.
    n_in_flight: the most micro-batches of a pipeline that are in flight at once (forward begun,
        backward not ended), or the passes of a step with several passes (`graphs.passes`). This
        graph is the step of one of them; each of the others holds what its forward pass saved.
    accumulated: parameters' gradients, outputs, that are summed over those in flight. The first
        backward pass to run makes them; each later one finds them on the device and adds to them,
        but has one less in flight beside it.
    others_bytes: a lower bound on the bytes that each other one in flight holds, since that may be
        another call of the model, or may have run its backward pass (`in_turn`).
    in_turn: whether those in flight run their backward passes one after the other, each on its own,
        and no new one begins in between (GPipe). Then gradients are added in place, and one whose
        backward pass has run still holds others_bytes. Otherwise one backward pass runs through all
        of them.
    host_state_bytes: bytes of optimizer state, and of parameters
        (`graphs.host_state.parameter_loads`), that are in host memory for the whole step. Nodes of
        phase optimizer copy them through their workspace, and their time includes the copies
        (`graphs.host_state`).
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    meta: GraphMeta = field(default_factory=GraphMeta, compare=False)
    n_in_flight: int = 1
    host_state_bytes: int = 0
    accumulated: tuple[str, ...] = ()
    others_bytes: int = 0
    in_turn: bool = False

    @cached_property
    def tensor_by_name(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """Tensor -> the node that outputs it; resident tensors are missing."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        """Tensor -> the nodes that read it, in graph order."""
        readers: dict[str, list[Node]] = {tensor.name: [] for tensor in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):  # a node counts once per tensor
                readers[name].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def forward_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.phase == "forward")

    @cached_property
    def later_nodes(self) -> tuple[Node, ...]:
        """All nodes that are not of the forward phase; each runs exactly once."""
        return tuple(node for node in self.nodes if node.phase != "forward")

    @cached_property
    def n_before_optimizer(self) -> int:
        """How many nodes come before the optimizer's first one; without an optimizer, all nodes.
        (While the optimizer steps, no other micro-batch is in flight.)"""
        positions = (index for index, node in enumerate(self.nodes) if node.phase == "optimizer")
        return next(positions, len(self.nodes))

    @cached_property
    def awaited_bytes(self) -> tuple[int, ...]:
        """For each later node: bytes of `accumulated` that are on the device while it runs in a
        later backward pass, but not in the first one, which has not made them yet.

        A gradient counts up to the last node that makes or reads it. With `in_turn`, others_bytes
        are added, which a micro-batch holds whose backward pass has run.
        """
        left_bytes = self.others_bytes if self.in_turn else 0
        awaited = tuple(accumulate(reversed(self._completed_bytes)))[::-1]
        return tuple(left_bytes + each for each in awaited)

    @cached_property
    def summed_bytes(self) -> tuple[int, ...]:
        """For each later node: bytes of `accumulated` that it is the last one to make or read; 0 if
        gradients are added in place (`in_turn`).

        At this node, autograd in a later backward pass adds the new gradient to the existing one
        out of place, so that both and their sum are live.
        """
        return tuple(0 if self.in_turn else each for each in self._completed_bytes)

    @cached_property
    def _completed_bytes(self) -> tuple[int, ...]:
        """For each later node: bytes of `accumulated` that it is the last one to make or read."""
        last_at = dict.fromkeys(self.accumulated, 0)
        for index, node in enumerate(self.later_nodes):
            if node.phase != "optimizer":
                last_at |= dict.fromkeys(last_at.keys() & {*node.inputs, *node.outputs}, index)
        completed_bytes = [0] * len(self.later_nodes)
        for name, index in last_at.items():
            completed_bytes[index] += self.tensor_by_name[name].size_bytes
        return tuple(completed_bytes)

    @cached_property
    def resident(self) -> tuple[Tensor, ...]:
        """Tensors that no node outputs, aliases included: live for the whole step."""
        return tuple(tensor for tensor in self.tensors if tensor.name not in self.producer)

    @cached_property
    def resident_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.resident if tensor.alias_of is None)

    @cached_property
    def baseline_time_s(self) -> float:
        """Seconds of the step if each node runs once."""
        return math.fsum(node.time_s for node in self.nodes)

    @cached_property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """Node -> the tensors that must be live for it to run: its inputs, and the storages that it
        makes views of.

        A view node normally reads a tensor on the storage. If it does not, the root of the storage
        is needed besides its inputs.
        """
        return {node.name: self._needs(node) for node in self.nodes}

    def _needs(self, node: Node) -> tuple[str, ...]:
        if not self.views:
            return node.inputs
        known = {self.root(name) for name in node.inputs} | set(node.outputs)
        roots = dict.fromkeys(self.root(name) for name in node.outputs)
        return (*node.inputs, *(r for r in roots if r not in known and r in self.producer))

    def root(self, name: str) -> str:
        """The tensor that owns the storage of the named one."""
        return self.tensor_by_name[name].alias_of or name

    @cached_property
    def views(self) -> dict[str, tuple[str, ...]]:
        """Root -> its aliases that nodes output; roots without such aliases are missing."""
        views: dict[str, tuple[str, ...]] = {}
        for tensor in self.tensors:
            if tensor.alias_of is not None and tensor.name in self.producer:
                views[tensor.alias_of] = (*views.get(tensor.alias_of, ()), tensor.name)
        return views
