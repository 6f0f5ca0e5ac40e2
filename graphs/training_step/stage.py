"""A module as one stage of a pipeline: what it is called with, and which outputs get gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphs.model_calls import Call, TraceError, nested
from graphs.pipeline import Pipeline, PipelineError


def check_stage(model: nn.Module, call: Call, pipeline: Pipeline, *, has_loss: bool) -> None:
    """Raise PipelineError if this module, called like this, cannot be this stage of a pipeline.

    has_loss: whether the caller gives a loss function.
    """
    name, where = type(model).__name__, f"stage {pipeline.stage} of {pipeline.n_stages}"
    if not any(True for _ in model.parameters()):
        raise PipelineError(f"{name} has no parameters: it cannot be a stage ({where})")
    if has_loss and not pipeline.is_last:
        raise PipelineError(
            f"loss is given, but {where} receives the gradients of its outputs from the next "
            "stage; only the last stage has a loss"
        )
    if not pipeline.is_first and not any(tensor.requires_grad for tensor in call.tensors):
        raise PipelineError(
            f"the inputs of {where} come from the stage before and need gradients: give a "
            'micro-batch such as torch.empty(..., device="meta", requires_grad=True)'
        )


def indices_with_gradient(output: Any) -> tuple[int, ...]:
    """The indices of all flat outputs of a stage that require a gradient.

    Raises TraceError if there are none.
    """
    found = tuple(
        index
        for index, item in enumerate(nested.leaves(output))
        if isinstance(item, torch.Tensor) and item.requires_grad
    )
    if not found:
        raise TraceError(
            "the stage returns no tensor that requires a gradient, so nothing in it is trained"
        )
    return found
