"""Gradients of outputs that arrive in another memory layout than the outputs have.

AOTAutograd traces the backward pass for gradients laid out as the outputs. A loss outside of the
model may hand over others (of a permuted output), and eager mode's operators follow their strides:
sums over them have other last bits than over a copy. So while such a step is traced, each of these
gradients passes through an operator whose result has the strides that arrive; afterwards the
gradient itself takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphs.model_calls import TraceError

_library: Any = torch.library.Library("checkpoint_solver", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("arrives_as(Tensor gradient, SymInt[] strides) -> Tensor")
_library.impl(
    "arrives_as",
    lambda gradient, strides: torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    ),
    "Meta",
)
_arrives_as = torch.ops.checkpoint_solver.arrives_as.default


class _Arriving(torch.autograd.Function):
    """The tensor; its gradient has these strides."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        ctx.strides = strides
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _arrives_as(gradient, ctx.strides), None


def with_strides(
    tensor: torch.Tensor, index: int, strides: Mapping[int, tuple[int, ...]]
) -> torch.Tensor:
    """The output of this index, for a trace where its gradient has these strides."""
    if (arriving := strides.get(index)) is None:
        return tensor
    made: torch.Tensor = _Arriving.apply(tensor, arriving)  # type: ignore[no-untyped-call]
    return made


def take_places(graph: torch.fx.Graph, tangents: Sequence[torch.fx.Node]) -> None:
    """The gradients take the places of what stands for them with other strides."""
    for node in graph.find_nodes(op="call_function", target=_arrives_as):
        tangent = node.args[0]
        if tangent not in tangents:
            raise TraceError("the gradient of an output in another memory layout is not its own")
        node.replace_all_uses_with(tangent)
        tangent.meta["val"] = node.meta["val"]
        graph.erase_node(node)
