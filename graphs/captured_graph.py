"""The Graph of a captured module, before the rest of the step is added."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphs.capture import Capture, Layout, Rehearsed, caching_configs
from graphs.costs import NodeCosts
from graphs.graph import Graph
from graphs.meta import GraphMeta
from graphs.model_calls import (
    Call,
    buffer_forms,
    bytes_by_dtype,
    environment_of,
    input_forms,
    local_part,
    parameter_forms,
    same_strides,
    tensor_names,
)
from graphs.rewrites import Variant
from graphs.training_step import accumulation, with_accumulation, with_device_bytes


def as_rehearsed(graph: Graph, rehearsed: Rehearsed) -> Graph:
    """With what eager mode did in the rehearsal."""
    in_place = [*graph.meta.eager_overwrites, *rehearsed.in_place]
    meta = replace(
        graph.meta,
        eager_overwrites=in_place,
        dropped=dict(rehearsed.dropped),
        saved_unread={name: list(held) for name, held in rehearsed.saved.items()},
    )
    return replace(graph, meta=meta)


def captured_graph(
    model: nn.Module,
    call: Call,
    captured: Capture,
    layout: Layout,
    rewrites: Variant,
    *,
    device: torch.device | None,
    gradients: str,
    cost: NodeCosts,
) -> Graph:
    """One variant of a captured step."""
    arguments = tensor_names(call, model)
    tensors_of: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}, "input": {}}
    for placeholder, source in captured.sources.items():
        name = arguments[source.index] if source.kind == "input" else source.name
        tensors_of.setdefault(source.kind, {})[name] = placeholder.name
    graph = Graph(
        nodes=tuple(layout.nodes),
        tensors=tuple(layout.tensors),
        outputs=tuple(layout.outputs),
        meta=GraphMeta(
            model=type(model).__name__,
            rewrites=list(rewrites),
            gradients=gradients,
            parameters=tensors_of["parameter"],
            buffers=tensors_of["buffer"],
            inputs=tensors_of["input"],
            parameter_layout=_parameter_layout(model, captured, layout),
            eager_overwrites=list(layout.in_place),
            gradient_sums=list(layout.sums),
            backward_functions=[
                nodes
                for nodes in (*layout.within.values(), *layout.functions.values())
                if len(nodes) > 1
            ],
            parameter_bytes=bytes_by_dtype(model),
            dtypes=_dtypes(layout),
            parameter_forms=parameter_forms(model),
            buffer_forms=buffer_forms(model),
            input_forms=input_forms(call.tensors),
            costs=cost.description,
            no_cache=bool(caching_configs(model)),
            environment={
                **environment_of(call, model, device=device),
                "device": "cpu" if device is None else device.type,
                "gradients": gradients,
                "gradient_outputs": list(captured.gradient_outputs),
                **_strides_of_gradients(captured),
                "values_read": _values_read(captured),
                **(
                    {"opaque": [each.described() for each in captured.opaque]}
                    if captured.opaque
                    else {}
                ),
            },
        ),
    )
    existing = accumulation(gradients)
    added = {
        new: layout.storage[leaf]
        for leaf, new in layout.gradients.items()
        if existing.of(captured.sources[leaf].kind)
    }
    if added:
        graph = with_accumulation(graph, added)
    return with_device_bytes(graph, cost.hardware)


def _dtypes(layout: Layout) -> dict[str, list[str]]:
    """dtype -> storages, but those that exist before the step."""
    before = ("parameter", "buffer", "input", "optimizer_state")
    found: dict[str, list[str]] = {}
    for tensor in layout.tensors:
        if tensor.kind not in before and tensor.name in layout.dtypes:
            found.setdefault(layout.dtypes[tensor.name], []).append(tensor.name)
    return found


def _strides_of_gradients(captured: Capture) -> dict[str, Any]:
    """Of outputs, where they are others than the output's own: pairs of its index and them."""
    found = []
    for index, tangent in captured.tangents.items():
        own, strides = captured.outputs[index].meta["val"], tangent.meta["val"].stride()
        if not same_strides(own.shape, own.stride(), strides):
            found.append([index, list(strides)])
    return {"gradient_strides": found} if found else {}


def _values_read(captured: Capture) -> list[dict[str, Any]]:
    """What the module read of the batch and its buffers, each once; of random numbers in order."""
    found: list[dict[str, Any]] = []
    for guard in captured.guards:
        if not guard.recipe.is_chance and (described := guard.described()) not in found:
            found.append(described)
    by_chance = [guard.described() for guard in captured.guards if guard.recipe.is_chance]
    if by_chance:
        seen = " ".join(each["seen"] for each in by_chance)
        found.append({"of": by_chance[0]["of"], "seen": seen})
    return found


def _sums(spec: Any) -> dict[str, int]:
    """spec: of the gradient of a distributed parameter; None: it is a plain one."""
    if spec is None or not any(placement.is_partial() for placement in spec.placements):
        return {}
    return {"n_sums": spec.mesh.size()}


def _parameter_layout(
    model: nn.Module, captured: Capture, layout: Layout
) -> dict[str, dict[str, Any]]:
    """What sharding needs to know of each parameter: shape and bytes of an element of what this
    rank has of it, its tensor in the graph, and that of its gradient (None: it has none). n_sums:
    tensor-parallel ranks whose gradients are parts of a sum that nobody has added up yet (1: they
    are not)."""
    parameters = {name: local_part(p) for name, p in model.named_parameters()}
    return {
        source.name: {
            "shape": list(parameters[source.name].shape),
            "element_bytes": parameters[source.name].element_size(),
            "tensor": node.name,
            "gradient": layout.gradients.get(node),
            **_sums(captured.gradient_specs.get(node)),
        }
        for node, source in captured.sources.items()
        if source.kind == "parameter" and source.name in parameters
    }
