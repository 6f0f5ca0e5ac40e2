"""Outputs whose gradients AOTAutograd expects in another form than a training step has them.

- Outputs that share memory with other outputs (`return logits, logits.t()`): AOTAutograd expects
  one gradient for the tensor that they are views of. A planned step takes one gradient for each
  output, so that the traced backward pass contains the views' own backward functions and the sum of
  their gradients, in the order in which eager mode's engine runs them.
- Gradients in another memory layout than their output: a loss outside of the model may produce them
  (for a permuted output). Eager mode's operators follow the strides of such a gradient: a sum over
  it has other last bits than a sum over a contiguous copy.

So while a step is traced, such outputs and gradients pass through a marker operator. Its result
looks like new memory, with the strides that the gradient will have. After tracing, `remove_markers`
removes the markers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphs.capture.own_operators import define
from graphs.model_calls import LayoutForShapes, TraceError, nested, storage_key, strided_like

_returned = define("returned(Tensor output) -> Tensor", Meta=strided_like)
_arrives_as = define(
    "arrives_as(Tensor gradient, SymInt[] strides) -> Tensor",
    Meta=lambda gradient, strides: strided_like(gradient, strides=strides),
)


class _OutputWithOwnMemory(torch.autograd.Function):
    """Passes an output on as if it had memory of its own."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> Any:
        return _returned(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class _GradientWithStrides(torch.autograd.Function):
    """Passes a tensor on; its gradient will have the given strides."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        ctx.strides = strides
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _arrives_as(gradient, ctx.strides), None


def title(index: int, spec: nested.Spec) -> str:
    """The name of a flat output for messages: "output ['logits'] of the model"."""
    return f"output {pytree.keystr(nested.paths(spec)[index]) or index} of the model"


def with_markers(
    outputs: Sequence[Any],
    gradient_outputs: Sequence[int],
    gradient_layouts: Mapping[int, LayoutForShapes],
) -> list[Any]:
    """The flat outputs with markers, so that those with a gradient seem to have their own memory.

    outputs: the flat outputs.
    gradient_outputs: indices of the outputs that get a gradient.
    gradient_layouts: index of an output -> layout of its gradient, if not the output's own. Those
        for another number of dimensions are ignored: they are of another kind of call.
    """
    n_sharing = Counter(storage_key(item) for item in outputs if isinstance(item, torch.Tensor))
    marked_outputs = list(outputs)
    for index in gradient_outputs:
        layout, shape = gradient_layouts.get(index), outputs[index].shape
        if layout is not None and layout.serves(shape):
            marked_outputs[index] = _GradientWithStrides.apply(
                marked_outputs[index], layout.strides(shape)
            )  # type: ignore[no-untyped-call]
    for index in gradient_outputs:
        if n_sharing[storage_key(outputs[index])] > 1:
            marked_outputs[index] = _OutputWithOwnMemory.apply(marked_outputs[index])  # type: ignore[no-untyped-call]
    return marked_outputs


def remove_markers(graph: torch.fx.Graph, tangents: Sequence[torch.fx.Node]) -> None:
    """Remove the markers from a traced graph; their readers read the marked tensors instead.

    tangents: the placeholders of the outputs' gradients.
    Raises TraceError if a marked gradient is not such a placeholder.
    """
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
