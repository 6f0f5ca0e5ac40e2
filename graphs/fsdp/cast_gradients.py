"""Gradients that autograd casts to the dtype they are reduced in, as soon as it has computed them.

FSDP2 of torch 2.15 lets autograd do that if they are reduced in a smaller dtype than they are
computed in. If they are reduced in a larger one, they are cast as they are copied into the buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from graphs.fsdp.groups import ShardedParameter
from graphs.graph import Graph, Node, Tensor


def with_cast_gradients(
    graph: Graph, parameters: Sequence[ShardedParameter]
) -> tuple[Graph, list[ShardedParameter]]:
    """The step with a node after each gradient that casts it, and the parameters with the gradients
    that these nodes make.

    Cost: linear in the graph.
    """
    step_tensors = graph.tensor_by_name
    nodes: list[Node] = []
    tensors: list[Tensor] = []
    smaller = {p.gradient: p for p in parameters if p.reduced_bytes < p.gathered_bytes}
    cast: dict[str | None, str] = {}  # the gradient as computed -> as cast
    for node in graph.nodes:
        nodes.append(node)
        for name in (name for name in node.outputs if name in smaller):
            parameter = smaller[name]
            made = cast[name] = f"fsdp: cast gradient ({parameter.path})"
            size_bytes = step_tensors[name].size_bytes * parameter.reduced_bytes
            tensors.append(Tensor(made, size_bytes // parameter.gathered_bytes, "gradient"))
            nodes.append(_cast_node(parameter, made))
    step = dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        tensors=(*graph.tensors, *tensors),
        outputs=tuple(cast.get(name, name) for name in graph.outputs),
    )
    return step, [
        dataclasses.replace(p, gradient=cast[p.gradient], is_gradient_cast=True)
        if p.gradient in cast
        else p
        for p in parameters
    ]


def _cast_node(parameter: ShardedParameter, made: str) -> Node:
    assert parameter.gradient is not None
    return Node(
        f"fsdp: cast gradient, backward ({parameter.path})",
        "fsdp.cast_gradient",
        (parameter.gradient,),
        (made,),
        time_s=0.0,
        phase="backward",
        recomputable=False,
        module=parameter.path.rpartition(".")[0],
    )
