"""Reads the layers of a model that is to be divided into pipeline stages: what each layer is called
with, and the least time it takes.

Layers are called one after another, each with what the one before it returned, as by
`nn.Sequential` and the stages of `torch.distributed.pipelining`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphs.capture import for_absent_card, one_at_a_time
from graphs.costs import CostModel, NodeCosts, default_costs, finish_measuring
from graphs.model_calls import Call, argument_order, as_call, check_call, nested
from graphs.trace.known_by import trace_key
from graphs.trace.module_step import trace_module
from graphs.trace.traced_device import traced_device
from graphs.training_step import FRESH, MetaOutputs, indices_with_gradient

StageOf = Callable[[Sequence[nn.Module]], nn.Module]
"""Makes the module of a stage from its layers."""


@dataclass(frozen=True)
class Layer:
    """One layer.

    inputs: what the layer is called with if it is the first of its stage. For the model's first
        layer, the batch; for all others, tensors on the meta device, of which those in floating
        point require gradients.
    form: layers of equal form make stages of equal graphs. A layer that shares a parameter with
        another layer has a form of its own.
    least_s: a lower bound on the seconds that any stage with this layer takes for it: those of its
        forward and backward operators. 0 if a stage may run fewer of them, because what follows
        need not use all that the layer returns.
    parameters: id() of its parameters.
    gives_gradient: whether the layer's output requires a gradient, because this layer or one before
        it is trained.
    """

    inputs: Any
    form: Hashable
    least_s: float
    parameters: frozenset[int]
    gives_gradient: bool


@one_at_a_time
def read_layers(
    layers: Sequence[nn.Module],
    batch: Any,
    *,
    stage_of: StageOf,
    device: torch.device | str | None = None,
    costs: CostModel | None = None,
) -> tuple[Layer, ...]:
    """Trace each layer on its own, equal layers once; no tensor is allocated or changed.

    layers: in the order in which they are called.
    batch: what the first layer is called with; batch, device and costs are as for
        `graphs.trace.trace`.
    stage_of: makes the module of a stage from its layers.

    Raises TraceError.
    """
    args, kwargs = as_call(batch)
    card = NodeCosts(costs).hardware
    model = nn.ModuleList(layers)
    target = traced_device(model, Call.of(args, kwargs), device, card)
    costs = default_costs(target) if costs is None else costs
    parameter_ids = [frozenset(map(id, layer.parameters())) for layer in layers]
    n_holders = Counter(parameter for each in parameter_ids for parameter in each)
    traced: dict[Hashable | None, tuple[Any, Hashable, float, bool]] = {}
    found: list[Layer] = []
    value, value_has_gradient = batch, False
    capability = None if card is None else card.compute_capability
    with for_absent_card(target, capability, model=model):
        for index, layer in enumerate(layers):
            module = stage_of([layer])
            args, kwargs = as_call(value)
            check_call(module, args, kwargs)
            key = trace_key(module, args, kwargs)
            if key is None or key not in traced:
                traced[key] = _trace_layer(module, args, kwargs, device=target, costs=costs)
            output, form, least_s, has_input_gradient = traced[key]
            if value_has_gradient and not has_input_gradient:  # earlier layers run no backward pass
                found = [dataclasses.replace(each, least_s=0.0) for each in found]
            value_has_gradient = _has_gradient(output)
            if any(n_holders[parameter] > 1 for parameter in parameter_ids[index]):
                form = None
            found.append(
                Layer(
                    inputs=value if index == 0 else nested.map_tensors(_as_stage_input, value),
                    form=index if form is None else form,
                    least_s=least_s,
                    parameters=parameter_ids[index],
                    gives_gradient=value_has_gradient,
                )
            )
            if len(list(nested.tensors(output))) > 1:  # the next layer may not use all of them
                found = [dataclasses.replace(each, least_s=0.0) for each in found]
            value = output
    finish_measuring(costs)
    return tuple(found)


def _trace_layer(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    costs: CostModel,
) -> tuple[Any, Hashable, float, bool]:
    """Trace one layer, without loss and optimizer.

    Returns what it returns (on the meta device), its form (None: unlike any other), the seconds of
    its operators, and whether its inputs get a gradient.

    A layer without a backward pass (frozen, and its inputs require no gradients) is not traced.
    """
    call = Call.of(args, kwargs, order=argument_order(module.forward))
    outputs = MetaOutputs(module, call, device=device)
    output = outputs.output(outputs.tensors)
    if not _has_gradient(output):
        return output, None, 0.0, False
    step = trace_module(
        module,
        call,
        device=device,
        choose=indices_with_gradient,
        gradients=FRESH,
        costs=costs,
    )
    graph, captured = step.graph, step.captured
    has_input_gradient = any(captured.sources[leaf].kind == "input" for leaf in captured.gradients)
    times = tuple((node.time_s, node.workspace_bytes) for node in graph.nodes)
    forms = tuple(graph.meta.parameter_forms.items()), tuple(graph.meta.buffer_forms.items())
    form = graph.graph_id, times, forms, tuple(graph.meta.input_forms)
    return output, form, math.fsum(time_s for time_s, _ in times), has_input_gradient


def _has_gradient(output: Any) -> bool:
    return any(tensor.requires_grad for tensor in nested.tensors(output))


def _as_stage_input(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a stage receives it from the one before: a leaf that requires a gradient if its
    dtype can have one."""
    needs_gradient = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(needs_gradient)
