"""Outputs whose gradients AOTAutograd expects otherwise than a step has them.

- Outputs that share memory with other outputs (`return logits, logits.t()`): it expects one
  gradient for the tensor that they are views of. A planned step takes one for each output: then the
  views' own backward functions and the sum of their gradients are in the traced backward pass, in
  the order in which eager mode's engine runs them.
- Gradients in another memory layout than the output has: a loss outside of the model may hand over
  others (of a permuted output), and eager mode's operators follow their strides: sums over them
  have other last bits than over a copy.

So while a step is traced, such outputs and gradients pass through an operator whose result seems to
be new memory, with the strides that arrive; afterwards the tensor itself takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.model_calls import TraceError, nested, strided_like

_library: Any = torch.library.Library("checkpoint_solver", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("returned(Tensor output) -> Tensor")
_library.impl("returned", strided_like, "Meta")
_library.define("arrives_as(Tensor gradient, SymInt[] strides) -> Tensor")
_library.impl(
    "arrives_as",
    lambda gradient, strides: torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    ),
    "Meta",
)
_returned = torch.ops.checkpoint_solver.returned.default
_arrives_as = torch.ops.checkpoint_solver.arrives_as.default


class _Returned(torch.autograd.Function):
    """The output as if it had memory of its own."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> Any:
        return _returned(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class _Arriving(torch.autograd.Function):
    """The tensor; its gradient has these strides."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        ctx.strides = strides
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _arrives_as(gradient, ctx.strides), None


def storage_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata


def title(index: int, spec: nested.Spec) -> str:
    """Of a flat output, for messages: "output ['logits'] of the model"."""
    return f"output {pytree.keystr(nested.paths(spec)[index]) or index} of the model"


def for_trace(
    outputs: Sequence[Any], chosen: Sequence[int], arriving: Mapping[int, tuple[int, ...]]
) -> list[Any]:
    """The flat outputs, those that get a gradient with memory of their own as far as can be seen.

    arriving: index of an output -> strides of its gradient, where they are not the output's own.
    """
    n_sharing = Counter(storage_of(item) for item in outputs if isinstance(item, torch.Tensor))
    made = list(outputs)
    for index in chosen:
        if index in arriving:
            made[index] = _Arriving.apply(made[index], arriving[index])  # type: ignore[no-untyped-call]
    for index in chosen:
        if n_sharing[storage_of(outputs[index])] > 1:
            made[index] = _Returned.apply(made[index])  # type: ignore[no-untyped-call]
    return made


def take_places(graph: torch.fx.Graph, tangents: Sequence[torch.fx.Node]) -> None:
    """Outputs and gradients take the places of what stands for them."""
    for node in graph.find_nodes(op="call_function", target=_returned):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_arrives_as):
        tangent = node.args[0]
        if tangent not in tangents:
            raise TraceError(
                "the gradient of an output arrives in another memory layout than the output's, and "
                "does not reach the output directly; return a clone of that output"
            )
        node.replace_all_uses_with(tangent)
        tangent.meta["val"] = node.meta["val"]
        graph.erase_node(node)
