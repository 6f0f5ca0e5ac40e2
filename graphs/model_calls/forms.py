"""What a traced step depends on, as text that `apply` compares and that graph and schedule files
store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphs.graph import FROZEN
from graphs.model_calls.call import Call, device_of
from graphs.model_calls.names import plain_arguments, tensor_names
from graphs.model_calls.tensors import is_distributed, local_part


def parameter_forms(model: nn.Module) -> dict[str, str]:
    """Name -> dtype and shape of each parameter: "float32 [5, 32]", "float32 [5, 32], frozen"."""
    return {
        name: _form(parameter) + ("" if parameter.requires_grad else FROZEN)
        for name, parameter in model.named_parameters()
    }


def buffer_forms(model: nn.Module) -> dict[str, str]:
    """Name -> dtype and shape of each buffer."""
    return {name: _form(buffer) for name, buffer in model.named_buffers()}


def input_forms(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Dtype and shape of each tensor of a call; also its strides if it is not contiguous, and
    whether it requires a gradient."""
    forms = []
    for tensor in tensors:
        words = [_form(tensor)]
        if any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            words.append("expanded (one row in memory for many)")
        elif not tensor.is_contiguous():
            words.append(f"strides {list(tensor.stride())}")
        if tensor.requires_grad:
            words.append("requires a gradient")
        forms.append(", ".join(words))
    return forms


def _form(tensor: torch.Tensor) -> str:
    form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not is_distributed(tensor):
        return form
    distributed: Any = tensor
    placements = ", ".join(map(repr, distributed.placements))
    return f"{form}, {placements} of {distributed.device_mesh.size()} ranks"


def bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    """Dtype name -> bytes of the parameters of that dtype. Shown in advice, never compared."""
    sizes: Counter[str] = Counter()
    for p in map(local_part, model.parameters()):
        sizes[str(p.dtype).removeprefix("torch.")] += p.nbytes
    return dict(sizes)


def environment_of(
    call: Call, model: nn.Module, *, device: torch.device | None = None
) -> dict[str, Any]:
    """What the traced graph depends on: if any of these values changes, the graph may differ.

    device: the device of the step (None: the model's).
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
