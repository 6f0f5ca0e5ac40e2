"""Gradients of outputs that arrive in another memory layout than planned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphs.graph import warn
from graphs.model_calls import same_strides


def rounds_otherwise(gradient: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a gradient has other strides than planned, so that sums over it may differ.

    For an expanded gradient, as of a mean, they do not."""
    is_expanded = 0 in gradient.stride()
    return not is_expanded and not same_strides(gradient.shape, gradient.stride(), strides)


def in_planned_strides(gradient: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The gradient in the strides that its views in the program were traced with; a copy if it has
    others. Warns if sums over it may differ."""
    if same_strides(gradient.shape, gradient.stride(), strides):
        return gradient
    if rounds_otherwise(gradient, strides):
        warn(
            f"the gradient of an output of shape {tuple(gradient.shape)} arrives with strides "
            f"{gradient.stride()} and is copied to those of the plan, {strides}: sums over it, "
            "such as the gradient of a bias, may differ from the plain model's in the last bit. "
            "Plan with this loss, solve(model, batch, loss=function(output, batch), ...); "
            "checkpoint_solver.fit plans for the layout that arrives by itself"
        )
    copy = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    )
    return copy.copy_(gradient)
