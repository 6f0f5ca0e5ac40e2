"""The Graph of a captured module, before the rest of the step is added."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphs.capture import Capture, Layout, Rehearsed, caching_configs
from graphs.costs import NodeCosts
from graphs.graph import Graph, GraphMeta
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
from graphs.rewrites import Variant, losses_in_chunks
from graphs.training_step import accumulation, with_accumulation, with_device_bytes


def as_rehearsed(graph: Graph, rehearsed: Rehearsed) -> Graph:
    """With what eager mode did in the rehearsal."""
    # Where a rewrite has let a node before it overwrite what is held until a node has run, what is
    # there instead. Names that the graph does not have stay as they are.
    there: dict[str, str] = {}  # storage -> the tensor that is there now
    saved = {name: list(names) for name, names in rehearsed.saved.items()}
    for node in graph.nodes:
        if node.overwrites is not None:
            there[graph.root(node.overwrites)] = node.outputs[0]
        if there and node.name in saved:
            names = saved[node.name]
            roots = [graph.root(n) if n in graph.tensor_by_name else n for n in names]
            saved[node.name] = [there.get(r, n) for r, n in zip(roots, names, strict=True)]
    meta = replace(
        graph.meta,
        eager_overwrites=[*graph.meta.eager_overwrites, *rehearsed.in_place],
        dropped=dict(rehearsed.dropped),
        saved_unread=saved,
        held_in_calls=None
        if rehearsed.in_calls is None
        else {name: list(names) for name, names in rehearsed.in_calls.items()},
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
    dtypes: dict[str, list[str]] = {}  # of storages, but those that exist before the step
    for tensor in layout.tensors:
        before = tensor.kind in ("parameter", "buffer", "input", "optimizer_state")
        if not before and tensor.name in layout.dtypes:
            dtypes.setdefault(layout.dtypes[tensor.name], []).append(tensor.name)
    environment = {
        **environment_of(call, model, device=device),
        "device": "cpu" if device is None else device.type,
        "gradients": gradients,
        "gradient_outputs": list(captured.gradient_outputs),
    }
    gradient_strides = []  # where they are others than the output's own
    for index, tangent in captured.tangents.items():
        own, strides = captured.outputs[index].meta["val"], tangent.meta["val"].stride()
        if not same_strides(own.shape, own.stride(), strides):
            gradient_strides.append([index, list(strides)])
    if gradient_strides:
        environment["gradient_strides"] = gradient_strides
    environment["values_read"] = _values_read(captured)
    if captured.opaque:
        environment["opaque"] = [each.described() for each in captured.opaque]
    graph = Graph(
        nodes=tuple(layout.nodes),
        tensors=tuple(layout.tensors),
        outputs=tuple(layout.outputs),
        meta=GraphMeta(
            model=type(model).__name__,
            rewrites=list(rewrites),
            called_losses=losses_in_chunks(layout),
            gradients=gradients,
            parameters=tensors_of["parameter"],
            buffers=tensors_of["buffer"],
            inputs=tensors_of["input"],
            parameter_layout=_parameter_layout(model, captured, layout),
            eager_overwrites=list(layout.in_place),
            module_calls={path: len(calls) for path, calls in layout.module_calls.items()},
            gradient_sums=list(layout.sums),
            backward_functions=[
                nodes
                for nodes in (*layout.within.values(), *layout.functions.values())
                if len(nodes) > 1
            ],
            parameter_bytes=bytes_by_dtype(model),
            dtypes=dtypes,
            parameter_forms=parameter_forms(model),
            buffer_forms=buffer_forms(model),
            input_forms=input_forms(call.tensors),
            costs=cost.description,
            no_cache=bool(caching_configs(model)),
            environment=environment,
        ),
    )
    existing = accumulation(gradients)
    added = {
        new: layout.storage[leaf]
        for leaf, new in layout.gradients.items()
        if existing.of(captured.sources[leaf].kind)
    }
    if added:
        graph = with_accumulation(graph, added, of_step=existing.of_step, taken=existing.taken)
    return with_device_bytes(graph, cost.hardware)


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


def _parameter_layout(
    model: nn.Module, captured: Capture, layout: Layout
) -> dict[str, dict[str, Any]]:
    """What sharding needs to know of each parameter: shape and bytes of an element of what this
    rank has of it, its tensor in the graph, and that of its gradient (None: it has none). n_sums:
    tensor-parallel ranks whose gradients are parts of a sum that nobody has added up yet (1: they
    are not)."""
    parameters = {name: local_part(p) for name, p in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for node, source in captured.sources.items():
        if source.kind == "parameter" and source.name in parameters:
            found[source.name] = {
                "shape": list(parameters[source.name].shape),
                "element_bytes": parameters[source.name].element_size(),
                "tensor": node.name,
                "gradient": layout.gradients.get(node),
            }
            spec = captured.gradient_specs.get(node)  # None: a plain parameter
            if spec is not None and any(each.is_partial() for each in spec.placements):
                found[source.name]["n_sums"] = spec.mesh.size()
    return found
