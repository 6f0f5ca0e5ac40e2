"""Choose the outputs of a model that receive gradients, since the loss is computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphs.model_calls import TraceError, find_loss, nested


def gradient_outputs(
    output: Any, *, reached: tuple[int, ...] | None, loss_outputs: Callable[[Any], Any] | None
) -> tuple[int, ...]:
    """Indices of the flat outputs that receive a gradient.

    reached: indices that a backward pass has reached (None: not known yet).
    loss_outputs: the user's function that selects outputs (None: the loss in the output or, without
        one, all outputs).

    Raises TraceError if none of them depends on a trained parameter.
    """
    flat = nested.leaves(output)
    if reached is not None:
        chosen = [flat[index] for index in reached if index < len(flat)]
    elif loss_outputs is None:
        try:
            chosen = [find_loss(output)]
        except TraceError:
            chosen = flat
    else:
        chosen = nested.leaves(loss_outputs(output))
    named = {id(item) for item in chosen if isinstance(item, torch.Tensor)}
    indices = tuple(
        index
        for index, item in enumerate(flat)
        if id(item) in named and item.requires_grad and item.is_floating_point()
    )
    if not indices:
        raise TraceError(
            "no output of the model depends on a parameter that requires a gradient; is the "
            "model frozen, or does loss_outputs return other tensors?"
        )
    return indices
