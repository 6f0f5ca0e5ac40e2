"""The nodes and tensors of a step, and what is looked up in them again and again."""

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

    n_in_flight: micro-batches of a pipeline, or passes of a step with several (`graphs.passes`),
        whose forward pass has begun and whose backward pass has not ended, at most. This step is
        that of one of them; each of the others holds what its forward pass left for backward.
    accumulated: outputs that the backward pass makes if it is the first of those in flight to run;
        each later one, beside which one less is in flight, finds them on the device and adds to
        them: gradients of parameters.
    others_bytes: what each of the others holds at least, since it may be another call, or may have
        run backward (`in_turn`).
    in_turn: those in flight run backward one after the other, each by itself, and no other begins
        after that (GPipe). So gradients are added in place, and one that has run leaves
        others_bytes. Else one backward pass runs through all of them.
    host_state_bytes: of the optimizer's state, and of parameters (`graphs.parameter_loads`), which
        are in host memory for the whole step. Nodes of phase optimizer copy them through their
        workspace, and their time is that with the copies (`graphs.host_state`).
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
        """The node that outputs each tensor; resident tensors have none."""
        return {name: node for node in self.nodes for name in node.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[Node, ...]]:
        """The nodes that read each tensor, in graph order."""
        readers: dict[str, list[Node]] = {tensor.name: [] for tensor in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):  # each reader once
                readers[name].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def forward_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.phase == "forward")

    @cached_property
    def later_nodes(self) -> tuple[Node, ...]:
        """All nodes of the other phases; each runs exactly once."""
        return tuple(node for node in self.nodes if node.phase != "forward")

    @cached_property
    def n_before_optimizer(self) -> int:
        """The nodes before the optimizer's first one, in whose step no other micro-batch is in
        flight any more; without an optimizer all nodes."""
        late = (index for index, node in enumerate(self.nodes) if node.phase == "optimizer")
        return next(late, len(self.nodes))

    @cached_property
    def awaited_bytes(self) -> tuple[int, ...]:
        """Of each later node: bytes of `accumulated` that are on the device while it runs in a
        backward pass that finds them there, and not yet in the one that makes them. So is what one
        that has run leaves.

        A gradient is awaited until the last node that reads it has run.
        """
        left_bytes = self.others_bytes if self.in_turn else 0
        awaited = tuple(accumulate(reversed(self._completed_bytes)))[::-1]
        return tuple(left_bytes + each for each in awaited)

    @cached_property
    def summed_bytes(self) -> tuple[int, ...]:
        """Of each later node: bytes of `accumulated` that it is the last one to read, unless they
        are added in place. A backward pass that finds them on the device has their sum beside both
        then, since autograd adds what it has got for several uses of a tensor out of place."""
        return tuple(0 if self.in_turn else each for each in self._completed_bytes)

    @cached_property
    def _completed_bytes(self) -> tuple[int, ...]:
        """Of each later node: bytes of `accumulated` that it is the last one to make or read."""
        late = dict.fromkeys(self.accumulated, 0)
        for index, node in enumerate(self.later_nodes):
            if node.phase != "optimizer":
                late |= dict.fromkeys(late.keys() & {*node.inputs, *node.outputs}, index)
        leaves = [0] * len(self.later_nodes)
        for name, index in late.items():
            leaves[index] += self.tensor_by_name[name].size_bytes
        return tuple(leaves)

    @cached_property
    def resident(self) -> tuple[Tensor, ...]:
        """Tensors that no node outputs: live for the whole step (their aliases too)."""
        return tuple(tensor for tensor in self.tensors if tensor.name not in self.producer)

    @cached_property
    def resident_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.resident if tensor.alias_of is None)

    @cached_property
    def baseline_time_s(self) -> float:
        """Seconds of the step when each node runs once."""
        return math.fsum(node.time_s for node in self.nodes)

    @cached_property
    def needs(self) -> dict[str, tuple[str, ...]]:
        """By node, what must be live for it to run: its inputs, and what it makes a view of.

        A view node normally reads a tensor on the storage; where the graph does not say so, the
        root of the storage is needed all the same.
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
        """Root -> its aliases that nodes output; only storages with such aliases."""
        views: dict[str, tuple[str, ...]] = {}
        for tensor in self.tensors:
            if tensor.alias_of is not None and tensor.name in self.producer:
                views[tensor.alias_of] = (*views.get(tensor.alias_of, ()), tensor.name)
        return views
