"""Which gradients autograd copies because their strides are not those of their parameter.

It keeps the first gradient of a parameter as it is if its strides are the parameter's, or if they
are contiguous and the parameter has gaps; else it copies it (`obeys_layout_contract` of
torch/csrc/autograd/utils/grad_layout_contract.h). Such gradients come from transposed copies of
weights, and from `einsum`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphs.capture.captured_step import Capture
from graphs.costs import transposed_block_bytes
from graphs.graph import Node
from graphs.model_calls import same_strides


@dataclass(frozen=True)
class GradientCopy:
    """A copy of a leaf's gradient.

    gradient: fx node of what is copied.
    strides: those of the copy (None: contiguous).
    """

    gradient: torch.fx.Node
    strides: tuple[int, ...] | None = None


def copy_for(captured: Capture, leaf: torch.fx.Node) -> GradientCopy:
    """A copy of the leaf's gradient that autograd keeps as it is."""
    gradient, strides = captured.gradients[leaf], _strides(captured, leaf)
    shape = gradient.meta["val"].shape
    if strides is None or same_strides(shape, strides, _contiguous(shape)):
        return GradientCopy(gradient)
    return GradientCopy(gradient, strides)


def is_kept(captured: Capture, leaf: torch.fx.Node) -> bool:
    """Whether autograd keeps the leaf's gradient, as far as its strides are concerned."""
    gradient: torch.Tensor = captured.gradients[leaf].meta["val"]
    strides = _strides(captured, leaf)
    return strides is None or same_strides(gradient.shape, gradient.stride(), strides)


def copy_node(name: str, copied: str, gradient: torch.Tensor) -> Node:
    """The node that copies the tensor `copied`, of which the gradient is a view, into `name`."""
    on_cpu = gradient.device.type == "cpu"
    return Node(
        name,
        op="aten.clone.default",
        inputs=(copied,),
        outputs=(name,),
        time_s=0.0,
        workspace_bytes=transposed_block_bytes(gradient) if on_cpu else 0,
        phase="backward",
        recomputable=False,
    )


def _strides(captured: Capture, leaf: torch.fx.Node) -> tuple[int, ...] | None:
    """The strides that autograd gives a parameter's gradient; None for tensors of the batch, which
    need not be leaves of the caller's autograd graph."""
    if captured.sources[leaf].kind != "parameter":
        return None
    value: torch.Tensor = leaf.meta["val"]
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return _contiguous(value.shape)
        expected *= size
    return value.stride()


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
