"""The layers of a model that is divided into stages: what each is called with, and its least time.

Layers are called one after another: what one returns is what the next is called with, as
`nn.Sequential` and the stages of `torch.distributed.pipelining` do.
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
from graphs.trace.known_by import known_by
from graphs.trace.module_step import trace_module
from graphs.trace.traced_device import traced_device
from graphs.training_step import FRESH, MetaOutputs, indices_with_gradient

StageOf = Callable[[Sequence[nn.Module]], nn.Module]
"""Makes the module of a stage of its layers."""


@dataclass(frozen=True)
class Layer:
    """One layer.

    inputs: what it is called with where it is the first of its stage: for all but the model's
        first tensors on the meta device, those of floating point with gradients.
    form: layers of the same form make stages of the same graph. One that shares a parameter with
        another layer has its own.
    least_s: seconds of its forward and backward operators, which any stage with it runs (0: where
        what follows does not use all that it returns, a stage may run fewer).
    parameters: identities of its parameters.
    gives_gradient: whether a gradient comes back to the first stage from here: this layer or one
        before it is trained.
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
    """Trace each layer by itself, those alike once; no tensor is allocated or changed.

    batch: what the first layer is called with. It, device and costs are as for
        `graphs.trace.trace`.

    Raises TraceError.
    """
    args, kwargs = as_call(batch)
    card = NodeCosts(costs).hardware
    model = nn.ModuleList(layers)
    target = traced_device(model, Call.of(args, kwargs), device, card)
    costs = default_costs(target) if costs is None else costs
    held = [frozenset(map(id, layer.parameters())) for layer in layers]
    n_holders = Counter(parameter for each in held for parameter in each)
    traced: dict[Hashable | None, tuple[Any, Hashable, float, bool]] = {}
    found: list[Layer] = []
    value, value_has_gradient = batch, False
    capability = None if card is None else card.compute_capability
    with for_absent_card(target, capability, model=model):
        for index, layer in enumerate(layers):
            module = stage_of([layer])
            args, kwargs = as_call(value)
            check_call(module, args, kwargs)
            known = known_by(module, args, kwargs)
            if known is None or known not in traced:
                traced[known] = _traced(module, args, kwargs, device=target, costs=costs)
            output, form, least_s, gives_back = traced[known]
            if value_has_gradient and not gives_back:  # what comes before runs no backward pass
                found = [dataclasses.replace(each, least_s=0.0) for each in found]
            value_has_gradient = _has_gradient(output)
            if any(n_holders[parameter] > 1 for parameter in held[index]):
                form = None
            found.append(
                Layer(
                    # what a stage gets of the one before it
                    inputs=value if index == 0 else nested.map_tensors(_received, value),
                    form=index if form is None else form,
                    least_s=least_s,
                    parameters=held[index],
                    gives_gradient=value_has_gradient,
                )
            )
            if len(list(nested.tensors(output))) > 1:  # what comes after may use some of it
                found = [dataclasses.replace(each, least_s=0.0) for each in found]
            value = output
    finish_measuring(costs)
    return tuple(found)


def _traced(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    costs: CostModel,
) -> tuple[Any, Hashable, float, bool]:
    """What a layer returns, its form (None: like no other) and its seconds, without loss and
    optimizer, and whether what it is called with gets a gradient.

    A frozen layer that gets no gradient either is not traced.
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
    gives_back = any(captured.sources[leaf].kind == "input" for leaf in captured.gradients)
    times = tuple((node.time_s, node.workspace_bytes) for node in graph.nodes)
    forms = tuple(graph.meta.parameter_forms.items()), tuple(graph.meta.buffer_forms.items())
    form = graph.graph_id, times, forms, tuple(graph.meta.input_forms)
    return output, form, math.fsum(time_s for time_s, _ in times), gives_back


def _has_gradient(output: Any) -> bool:
    return any(tensor.requires_grad for tensor in nested.tensors(output))


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """What a stage gets of the one before it."""
    needs_gradient = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(needs_gradient)
