"""The parts of a training step around the module: gradient accumulation and the optimizer.

They are added to a traced module's graph without torch, so that a plan can be recreated from what a
schedule file says about them.
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
    """Which gradients exist before the step, so that new ones are added to them.

    of_module: those of parameters. of_inputs: those of inputs that require gradients.
    of_step: they are made by another pass of the same step (`Graph.accumulated`), or by another
        micro-batch, where all forward passes come before the first backward pass.
    taken: none exist, and each is copied and freed as soon as it is complete (`graphs.zero`).
    """

    of_module: bool
    of_inputs: bool
    of_step: bool = False
    taken: bool = False

    def of(self, kind: str) -> bool:
        """kind: of the tensor that the gradient is for, as in `Tensor.kind`."""
        return self.of_inputs if kind == "input" else self.of_module


FRESH, ACCUMULATE, OF_MICRO_BATCHES = "fresh", "accumulate", "accumulate, inputs fresh"
OF_PASSES = "accumulate over passes, inputs fresh"
TAKEN = "taken, inputs fresh"
_ACCUMULATIONS = {
    FRESH: Accumulation(of_module=False, of_inputs=False),
    ACCUMULATE: Accumulation(of_module=True, of_inputs=True),
    OF_MICRO_BATCHES: Accumulation(of_module=True, of_inputs=False),  # each has its own inputs
    OF_PASSES: Accumulation(of_module=True, of_inputs=False, of_step=True),
    TAKEN: Accumulation(of_module=True, of_inputs=False, taken=True),
}


def accumulation(word: str) -> Accumulation:
    """What `GraphMeta.gradients` stands for. Raises ValueError for another word."""
    if word not in _ACCUMULATIONS:
        known = ", ".join(map(repr, _ACCUMULATIONS))
        raise ValueError(f"gradients is {word!r}; one of {known}")
    return _ACCUMULATIONS[word]


def with_accumulation(
    graph: Graph, gradients: Mapping[str, str], *, of_step: bool = False, taken: bool = False
) -> Graph:
    """Gradients exist from the start; a new one is added once it is complete and its parameter is
    not read any more, which is when the runtime returns it.

    gradients: tensor of a new gradient -> tensor of its parameter.
    of_step: as in `Accumulation`: they are outputs, and none is there from the start.
    taken: as in `Accumulation`: what takes them stands in place of what adds them.
    """
    gradients = {name: of for name, of in gradients.items() if name in graph.producer}
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
            read = (name,) if of_step or taken else (name, name + ACCUMULATED)
            op = TAKES if taken else "aten.add_.Tensor"
            nodes.append(Node(f"accumulate_{name}", op, read, (), 0.0, 0, "backward", False))
    if of_step:
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
    kept = [n for n in graph.outputs if graph.tensor_by_name[n].kind == "gradient"]
    gradients = resident or kept  # accumulating: the new ones are freed by then
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
_HELD = "loss.held"
_VALUE, _VALUE_BYTES = "loss.value", 16
"""The loss and the gradient that `backward` starts from, in float64 at most."""


def with_unknown_loss(graph: Graph, *, reserved_bytes: int, held_bytes: int = 0) -> Graph:
    """Add a loss of which only this is known: it reads the outputs and returns their gradients.

    It is one node between forward and backward, before which these gradients are not live.

    reserved_bytes: what it takes besides them.
    held_bytes: the part of that which is live for the whole step: targets, and what the loss of the
        step before keeps, then that of this one (the terms of `mse_loss`, whose storage its value
        is in).
    """
    tangents = tuple(tensor.name for tensor in graph.tensors if tensor.kind == "tangent")
    forward = {name for node in graph.forward_nodes for name in node.outputs}
    loss = Node(
        name=LOSS,
        op="the loss, computed by the caller",
        inputs=tuple(name for name in graph.outputs if name in forward),
        outputs=(*tangents, _VALUE),
        time_s=0.0,
        workspace_bytes=reserved_bytes - held_bytes,
        phase="outside",
        recomputable=False,
    )
    graph = dataclasses.replace(
        graph,
        nodes=(*graph.forward_nodes, loss, *graph.later_nodes),
        tensors=(*graph.tensors, Tensor(_VALUE, _VALUE_BYTES, "activation")),
        outputs=(*graph.outputs, _VALUE),
        meta=graph.meta.with_environment(loss="outside"),
    )
    return with_resident(graph, _HELD, held_bytes)


def with_loss_bytes(graph: Graph, *, reserved_bytes: int, held_bytes: int) -> Graph:
    """The same step, whose unknown loss takes these bytes, as of `with_unknown_loss`."""
    nodes = tuple(
        dataclasses.replace(node, workspace_bytes=reserved_bytes - held_bytes)
        if node.name == LOSS
        else node
        for node in graph.nodes
    )
    tensors = tuple(tensor for tensor in graph.tensors if tensor.name != _HELD)
    return with_resident(
        dataclasses.replace(graph, nodes=nodes, tensors=tensors), _HELD, held_bytes
    )


def with_dropped_outputs(graph: Graph, names: Sequence[str]) -> Graph:
    """The step of a caller that lets go of these outputs of the model once the loss is computed,
    before the backward pass."""
    later, kept = graph.later_nodes, set(graph.outputs)
    of_loss = (at for at, node in enumerate(later) if node.phase == "outside")
    computed = max((at for at in of_loss if kept.intersection(later[at].outputs)), default=-1)
    # Whatever else is returned is there as well: it names all, for `Graph.returned`.
    drop = Node(DROP, "outputs, dropped by the caller", graph.returned, (), 0.0)
    drop = dataclasses.replace(drop, phase="outside", recomputable=False)
    return dataclasses.replace(
        graph,
        nodes=(*graph.forward_nodes, *later[: computed + 1], drop, *later[computed + 1 :]),
        outputs=tuple(name for name in graph.outputs if name not in names),
    )


def with_resident(graph: Graph, name: str, size_bytes: int) -> Graph:
    """Add memory that is live for the whole step (the buckets of data parallelism)."""
    if not size_bytes:
        return graph
    held = Tensor(name, size_bytes, "buffer")
    return dataclasses.replace(graph, tensors=(*graph.tensors, held))
