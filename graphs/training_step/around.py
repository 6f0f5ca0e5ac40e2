"""Adds the other parts of a training step to a module's graph: gradient accumulation, the
optimizer, and a loss of which only the bytes are known.

This needs no torch, so that a plan can be recreated from what a schedule file says about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphs.graph import DROP, Graph, Node, Tensor
from graphs.zero import TAKES

ACCUMULATED = ".accumulated"


@dataclass(frozen=True)
class Accumulation:
    """To which existing gradients new ones are added.

    to_parameters: gradients of parameters accumulate.
    to_inputs: gradients of inputs that require gradients accumulate.
    within_step: they do not exist before the step, but accumulate over its passes
        (`Graph.accumulated`), or over micro-batches if all forward passes come before the first
        backward pass.
    taken: none exist; each new gradient is copied and freed as soon as it is complete
        (`graphs.zero`).
    """

    to_parameters: bool
    to_inputs: bool
    within_step: bool = False
    taken: bool = False

    def adds_to(self, kind: str) -> bool:
        """Whether gradients of tensors of this kind (`Tensor.kind`) accumulate."""
        return self.to_inputs if kind == "input" else self.to_parameters


FRESH, ACCUMULATE, OF_MICRO_BATCHES = "fresh", "accumulate", "accumulate, inputs fresh"
OF_PASSES = "accumulate over passes, inputs fresh"
TAKEN = "taken, inputs fresh"
_ACCUMULATIONS = {
    FRESH: Accumulation(to_parameters=False, to_inputs=False),
    ACCUMULATE: Accumulation(to_parameters=True, to_inputs=True),
    OF_MICRO_BATCHES: Accumulation(to_parameters=True, to_inputs=False),  # each has its own inputs
    OF_PASSES: Accumulation(to_parameters=True, to_inputs=False, within_step=True),
    TAKEN: Accumulation(to_parameters=True, to_inputs=False, taken=True),
}


def accumulation(word: str) -> Accumulation:
    """The meaning of a word in `GraphMeta.gradients`. Raises ValueError for an unknown word."""
    if word not in _ACCUMULATIONS:
        known = ", ".join(map(repr, _ACCUMULATIONS))
        raise ValueError(f"gradients is {word!r}; one of {known}")
    return _ACCUMULATIONS[word]


def with_accumulation(
    graph: Graph, gradients: Mapping[str, str], *, within_step: bool = False, taken: bool = False
) -> Graph:
    """Add resident gradients, and nodes that add the new gradients to them.

    A new gradient is added as soon as it is complete and its parameter is not read any more, which
    is when the runtime returns it.

    gradients: tensor of a new gradient -> tensor of its parameter.
    within_step: as in `Accumulation`. The gradients stay outputs, and none is resident.
    taken: as in `Accumulation`. Each gradient is read by a node that takes it, and none is
        resident.
    """
    gradients = {name: adds_to for name, adds_to in gradients.items() if name in graph.producer}
    # each gradient is added after the later of its maker and the last reader of its parameter
    last_reader = {name: node.name for node in graph.later_nodes for name in node.inputs}
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    added_after: dict[str, list[str]] = {}
    for name, parameter in gradients.items():
        maker = graph.producer[name].name
        after = max(maker, last_reader.get(parameter, maker), key=position.__getitem__)
        added_after.setdefault(after, []).append(name)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(node)
        for name in added_after.get(node.name, ()):
            read = (name,) if within_step or taken else (name, name + ACCUMULATED)
            op = TAKES if taken else "aten.add_.Tensor"
            nodes.append(Node(f"accumulate_{name}", op, read, (), 0.0, 0, "backward", False))
    if within_step:
        return dataclasses.replace(graph, nodes=tuple(nodes), accumulated=tuple(gradients))
    resident = tuple(
        Tensor(name + ACCUMULATED, graph.tensor_by_name[name].size_bytes, "gradient")
        for name in (() if taken else gradients)
    )
    return dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        tensors=graph.tensors + resident,
        outputs=tuple(name for name in graph.outputs if name not in gradients),
    )


def with_optimizer(graph: Graph, optimizer: Mapping[str, Any] | None) -> Graph:
    """Add the optimizer's state as a resident tensor and its step as the last node.

    optimizer: as `optimizer_costs` returns it; None: the graph is returned unchanged.
    """
    if optimizer is None:
        return graph
    resident = [tensor.name for tensor in graph.resident if tensor.kind == "gradient"]
    fresh = [n for n in graph.outputs if graph.tensor_by_name[n].kind == "gradient"]
    gradients = resident or fresh  # if gradients accumulate, the new ones are freed by then
    parameters = [tensor.name for tensor in graph.resident if tensor.kind == "parameter"]
    step = Node(
        name="optimizer_step",
        op=str(optimizer["name"]),
        inputs=(*gradients, *parameters, "optimizer_state"),
        outputs=(),
        time_s=float(optimizer["time_s"]),
        workspace_bytes=int(optimizer["workspace_bytes"]),
        phase="optimizer",
        recomputable=False,
    )
    state = Tensor("optimizer_state", int(optimizer["state_bytes"]), "optimizer_state")
    return dataclasses.replace(
        graph,
        nodes=(*graph.nodes, step),
        tensors=(*graph.tensors, state),
        meta=graph.meta.with_environment(optimizer=dict(optimizer)),
    )


LOSS = "loss.of_the_caller"
_HELD_BY_LOSS = "loss.held"
_LOSS_VALUE, _LOSS_VALUE_BYTES = "loss.value", 16
"""The loss and the gradient that `backward` starts from: two numbers, in float64 at most."""


def with_unknown_loss(graph: Graph, *, reserved_bytes: int, held_bytes: int = 0) -> Graph:
    """Add an unknown loss: a node between forward and backward that reads the outputs and makes
    their gradients, which are not live before.

    reserved_bytes: what the loss takes besides these gradients.
    held_bytes: the part of it that is live for the whole step: targets, and memory that the loss
        value keeps alive, first that of the step before and then this one's (the value of
        `mse_loss` is in the storage of its unreduced terms).
    """
    tangents = tuple(tensor.name for tensor in graph.tensors if tensor.kind == "tangent")
    forward = {name for node in graph.forward_nodes for name in node.outputs}
    loss = Node(
        name=LOSS,
        op="the loss, computed by the caller",
        inputs=tuple(name for name in graph.outputs if name in forward),
        outputs=(*tangents, _LOSS_VALUE),
        time_s=0.0,
        workspace_bytes=reserved_bytes - held_bytes,
        phase="outside",
        recomputable=False,
    )
    graph = dataclasses.replace(
        graph,
        nodes=(*graph.forward_nodes, loss, *graph.later_nodes),
        tensors=(*graph.tensors, Tensor(_LOSS_VALUE, _LOSS_VALUE_BYTES, "activation")),
        outputs=(*graph.outputs, _LOSS_VALUE),
        meta=graph.meta.with_environment(loss="outside"),
    )
    return with_resident(graph, _HELD_BY_LOSS, held_bytes)


def with_loss_bytes(graph: Graph, *, reserved_bytes: int, held_bytes: int) -> Graph:
    """The same step with other bytes for its unknown loss; they are as in `with_unknown_loss`."""
    nodes = tuple(
        dataclasses.replace(node, workspace_bytes=reserved_bytes - held_bytes)
        if node.name == LOSS
        else node
        for node in graph.nodes
    )
    tensors = tuple(tensor for tensor in graph.tensors if tensor.name != _HELD_BY_LOSS)
    return with_resident(
        dataclasses.replace(graph, nodes=nodes, tensors=tensors), _HELD_BY_LOSS, held_bytes
    )


def with_dropped_outputs(graph: Graph, names: Sequence[str]) -> Graph:
    """The step of a caller that drops these outputs of the model between computing the loss and the
    backward pass."""
    later, kept = graph.later_nodes, set(graph.outputs)
    loss_positions = (at for at, node in enumerate(later) if node.phase == "outside")
    last = max((at for at in loss_positions if kept.intersection(later[at].outputs)), default=-1)
    # the node reads all outputs of the model, dropped or not, for `Graph.returned`
    drop = Node(DROP, "outputs, dropped by the caller", graph.returned, (), 0.0)
    drop = dataclasses.replace(drop, phase="outside", recomputable=False)
    return dataclasses.replace(
        graph,
        nodes=(*graph.forward_nodes, *later[: last + 1], drop, *later[last + 1 :]),
        outputs=tuple(name for name in graph.outputs if name not in names),
    )


def with_resident(graph: Graph, name: str, size_bytes: int) -> Graph:
    """Add memory that is live for the whole step, such as the buckets of data parallelism."""
    if not size_bytes:
        return graph
    held = Tensor(name, size_bytes, "buffer")
    return dataclasses.replace(graph, tensors=(*graph.tensors, held))
