"""The fake DTensors that stand for a module's own inside of a trace.

AOTAutograd takes them apart: the traced program has this rank's parts as its inputs and outputs,
and DTensor's own dispatch has turned each operator into local ones and collectives. How DTensor
places a gradient (as partial sums, say, or whole) is in none of these: it is noted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def with_part(like: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor that is placed as `like` is, with this local part; it requires no gradient."""
    made: torch.Tensor = type(like)(part, like._spec, requires_grad=False)
    return made


def forget_placements() -> None:
    """Forget how DTensor has placed the results of earlier calls.

    A vocabulary split over the ranks is placed with a mask, that of the rows which this rank lacks,
    from the lookup until its results are summed. A trace that was given up in between leaves its
    mask, on fake tensors, in what DTensor remembers.
    """
    from torch.distributed.tensor import debug

    clear: Any = debug._clear_sharding_prop_cache
    clear()


def gradient_noted(tensor: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
    """The DTensor. note: called with the spec (mesh, placements, shape, strides) of its gradient
    in the backward pass."""
    apply: Any = _GradientNoted.apply
    same: torch.Tensor = apply(tensor, note)
    return same


class _GradientNoted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
        ctx.note = note
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.note(gradient._spec)
        return gradient, None
