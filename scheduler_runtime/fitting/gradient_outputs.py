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

    Outputs of this call may be others than those that were reached: if it has none of these, they
    are chosen as if nothing was known.

    Raises TraceError if none of them depends on a trained parameter.
    """
    flat = nested.leaves(output)
    chosen = [flat[index] for index in reached or () if index < len(flat)]
    if not any(map(_may_get_gradient, chosen)):
        chosen = _computed_into_loss(output, flat, loss_outputs)
    named = {id(item) for item in chosen if _may_get_gradient(item)}
    indices = tuple(index for index, item in enumerate(flat) if id(item) in named)
    if not indices:
        raise TraceError(
            "no output of the model depends on a parameter that requires a gradient; is the "
            "model frozen, or does loss_outputs return other tensors?"
        )
    return indices


def _computed_into_loss(
    output: Any, flat: list[Any], loss_outputs: Callable[[Any], Any] | None
) -> list[Any]:
    """The outputs that the loss is computed from, as far as that is known before it is."""
    if loss_outputs is not None:
        return nested.leaves(loss_outputs(output))
    try:
        return [find_loss(output)]
    except TraceError:
        return flat


def _may_get_gradient(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.requires_grad
