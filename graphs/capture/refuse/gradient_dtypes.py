"""Refuses gradients in another dtype than the tensors that they are of (`Tensor.grad_dtype`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graphs.model_calls import TraceError, gradient_dtype


def refuse_gradient_dtypes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Raise TraceError if a trained parameter, or an input that gets a gradient, sets another dtype
    for its gradient.

    Autograd casts each part of such a gradient before it adds them, if a parameter is used several
    times. AOTAutograd does not see this: a trace would add them first, which rounds differently.
    """
    parameters = [(f"parameter {name!r}", p) for name, p in model.named_parameters()]
    batch = [(f"tensor {i} of the batch", tensor) for i, tensor in enumerate(inputs)]
    for name, tensor in (*parameters, *batch):
        if tensor.requires_grad and (dtype := gradient_dtype(tensor)) != tensor.dtype:
            raise TraceError(
                f"{type(model).__name__} cannot be traced: {name} is {tensor.dtype} and has "
                f"grad_dtype={dtype}: a trace does not see in which dtype its gradients are added; "
                f"set grad_dtype={tensor.dtype}",
                runs_in_eager=True,
            )
