"""Properties of the calls in a traced program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphs.model_calls import named_arguments


def is_backward(node: torch.fx.Node) -> bool:
    """Whether the node runs in the backward pass, by the tag that PyTorch's partitioners use."""
    return node.meta.get("partitioner_tag") == "is_backward"


VIEW_OF_SCATTER: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.slice_scatter.default: torch.ops.aten.slice.Tensor,
    torch.ops.aten.select_scatter.default: torch.ops.aten.select.int,
    torch.ops.aten.diagonal_scatter.default: torch.ops.aten.diagonal.default,
}
"""Operator that makes a tensor with one part replaced -> operator that views the part, with the
same arguments. A write of eager mode into the view is traced as the former."""


def annotations_of(node: torch.fx.Node) -> dict[str, Any]:
    """What was annotated (`torch.fx.traceback.annotate`) while the node was traced."""
    return node.meta.get("custom") or {}


_CUDA_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def may_be_random(operator: Any) -> bool:
    """Whether some calls of the operator draw random numbers.

    Fused attention on the CPU has the tag, but refuses dropout.
    """
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def is_random(node: torch.fx.Node) -> bool:
    """Whether the call draws random numbers. Fused attention on CUDA does not without dropout."""
    if node.target not in _CUDA_ATTENTION:
        return may_be_random(node.target)
    arguments = named_arguments(node.target, node.args, node.kwargs)
    return bool(arguments.get("dropout_p", 0.0) != 0.0)
