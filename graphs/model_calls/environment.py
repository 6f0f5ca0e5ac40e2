"""What a traced step depends on besides the model: compared by `apply`, kept in both files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphs.model_calls.call import Call, device_of
from graphs.model_calls.names import plain_arguments, tensor_names


def environment_of(
    call: Call, model: nn.Module, *, device: torch.device | None = None
) -> dict[str, Any]:
    """What the traced graph depends on: with another value of any of these the graph may differ.

    device: of the step (None: that of the model).
    """
    kind = (device_of(model) if device is None else device).type
    autocast = (
        str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        if kind != "meta" and torch.is_autocast_enabled(kind)
        else None
    )
    return {
        "torch": torch.__version__.split("+")[0],
        "train": model.training,
        "autocast": autocast,
        "arguments": tensor_names(call, model),
        "options": plain_arguments(call, model),
        "shapes": [list(t.shape) for t in call.tensors],
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in call.tensors],
    }
