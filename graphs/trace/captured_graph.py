"""The Graph of a captured module, before loss, sharding and optimizer are added."""

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
    LayoutForShapes,
    buffer_forms,
    bytes_by_dtype,
    environment_of,
    fills_its_storage,
    input_forms,
    local_part,
    parameter_forms,
    same_strides,
    tensor_names,
)
from graphs.rewrites import Variant, losses_in_chunks
from graphs.training_step import accumulation, with_accumulation, with_device_bytes


def as_rehearsed(graph: Graph, rehearsed: Rehearsed) -> Graph:
    """The graph, with what eager mode did in the rehearsal recorded in its meta."""
    # A rewrite may have let a node overwrite a tensor that eager mode holds longer. Then the tensor
    # that is on its storage by then is recorded instead. Names that the graph does not have stay.
    now_on_storage: dict[str, str] = {}  # storage -> the tensor that is on it now
    saved = {name: list(names) for name, names in rehearsed.saved.items()}
    for node in graph.nodes:
        if node.overwrites is not None:
            now_on_storage[graph.root(node.overwrites)] = node.outputs[0]
        if now_on_storage and node.name in saved:
            names = saved[node.name]
            roots = [graph.root(n) if n in graph.tensor_by_name else n for n in names]
            saved[node.name] = [now_on_storage.get(r, n) for r, n in zip(roots, names, strict=True)]
    meta = replace(
        graph.meta,
        eager_overwrites=[*graph.meta.eager_overwrites, *rehearsed.in_place],
        dropped=dict(rehearsed.dropped),
        saved_unread=saved,
        held_in_calls=None
        if rehearsed.in_calls is None
        else {name: list(names) for name, names in rehearsed.in_calls.items()},
        dead_results={
            each.name: {"after": each.after, "size_bytes": each.size_bytes}
            for each in rehearsed.dead
        },
        dead_gradients={
            each.name: {
                "operator": each.operator,
                "after": each.after,
                "size_bytes": each.size_bytes,
            }
            for each in rehearsed.dead_gradients
        },
        no_cache=graph.meta.no_cache and not rehearsed.unfilled_caches,
        unfilled_caches=list(rehearsed.unfilled_caches),
        dead_calls=[
            {"operator": each.operator, "module": each.module, "after": each.after}
            for each in rehearsed.dead_calls
        ],
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
    """The graph of one variant of a captured step.

    captured: the traced program, after the rewrites.
    layout: its nodes and tensors.
    rewrites: the variant.
    device: the device of the step; None: the model's.
    gradients: as in `GraphMeta.gradients`.
    cost: gave the nodes their costs; describes the cost model.
    """
    arguments = tensor_names(call, model)
    tensors_of: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}, "input": {}}
    for placeholder, source in captured.sources.items():
        name = arguments[source.index] if source.kind == "input" else source.name
        tensors_of.setdefault(source.kind, {})[name] = placeholder.name
    dtypes: dict[str, list[str]] = {}  # dtype -> storages, except those that exist before the step
    for tensor in layout.tensors:
        exists_before = tensor.kind in ("parameter", "buffer", "input", "optimizer_state")
        if not exists_before and tensor.name in layout.dtypes:
            dtypes.setdefault(layout.dtypes[tensor.name], []).append(tensor.name)
    environment = {
        **environment_of(call, model, device=device),
        "device": "cpu" if device is None else device.type,
        "gradients": gradients,
        "gradient_outputs": list(captured.gradient_outputs),
    }
    gradient_layouts = []  # of gradients whose strides differ from those of their output
    for index, tangent in captured.tangents.items():
        output, strides = captured.outputs[index].meta["val"], tangent.meta["val"].stride()
        if not same_strides(output.shape, output.stride(), strides):
            of_gradient = LayoutForShapes.of(tangent.meta["val"])
            gradient_layouts.append([index, *of_gradient.described()])
    if gradient_layouts:
        environment["gradient_layouts"] = gradient_layouts
    environment["values_read"] = _values_read(captured)
    if captured.opaque:
        environment["opaque"] = [each.described() for each in captured.opaque]
    if captured.left:
        environment["left"] = [list(each.place) for each in captured.left]
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
                for nodes in (*layout.held_within_call.values(), *layout.functions.values())
                if len(nodes) > 1
            ],
            parameter_bytes=bytes_by_dtype(model),
            dtypes=dtypes,
            parameter_forms=parameter_forms(model),
            buffer_forms=buffer_forms(model),
            input_forms=input_forms(call.tensors),
            differentiated_modules=list(captured.differentiated),
            costs=cost.description,
            no_cache=bool(caching_configs(model)),
            environment=environment,
        ),
    )
    existing = accumulation(gradients)
    added = {
        new: layout.storage[leaf]
        for leaf, new in layout.gradients.items()
        if existing.adds_to(captured.sources[leaf].kind)
    }
    if added:
        graph = with_accumulation(
            graph, added, within_step=existing.within_step, taken=existing.taken
        )
    return with_device_bytes(graph, cost.hardware)


def _values_read(captured: Capture) -> list[dict[str, Any]]:
    """The values that the module read of the batch and its buffers, each once, and those that it
    read of random numbers, in order and as one entry."""
    found: list[dict[str, Any]] = []
    for guard in captured.guards:
        if not guard.recipe.is_chance and (description := guard.described()) not in found:
            found.append(description)
    random_descriptions = [guard.described() for guard in captured.guards if guard.recipe.is_chance]
    if random_descriptions:
        seen = " ".join(each["seen"] for each in random_descriptions)
        found.append({"of": random_descriptions[0]["of"], "seen": seen})
    return found


def _parameter_layout(
    model: nn.Module, captured: Capture, layout: Layout
) -> dict[str, dict[str, Any]]:
    """What sharding and copies to the host need to know about each parameter, by its name.

    shape, element_bytes: of this rank's part of the parameter.
    tensor: its tensor in the graph.
    gradient: the tensor of its gradient; None: it has none.
    n_sums: how many tensor-parallel ranks hold partial sums of the gradient that are not reduced
        yet; missing: the gradient is not a partial sum.
    fills_storage: False for a parameter that is not contiguous or is part of a larger tensor;
        missing: it fills its storage.
    """
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
            if not fills_its_storage(parameters[source.name]):
                found[source.name]["fills_storage"] = False
    return found
