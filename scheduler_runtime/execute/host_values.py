"""Stand-ins for parameters whose values are in host memory, and how a program loads the values.

While its value is on the host, a parameter has a stand-in as its data: a single NaN, expanded to
the shape of the parameter with strides of 0. Autograd and the optimizer see the parameter's shape,
dtype and device, and code that reads it by mistake gets NaN instead of wrong values. A program
finds the value by the storage of the stand-in.
"""

from __future__ import annotations

import torch

_VALUES: dict[int, torch.Tensor] = {}
"""Address of a stand-in's storage -> the value in host memory."""


def stand_in_for(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Make a stand-in for a parameter.

    value: its value in host memory, known until `forget_value`.
    """
    number = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    _VALUES[number.untyped_storage()._cdata] = value
    return number.expand(parameter.shape)


def is_stand_in(tensor: torch.Tensor, stand_in: torch.Tensor) -> bool:
    """Whether the tensor is this stand-in, or a view of it."""
    return bool(tensor.untyped_storage()._cdata == stand_in.untyped_storage()._cdata)


def forget_value(stand_in: torch.Tensor) -> None:
    """Drop the value of a stand-in that is not used any more."""
    _VALUES.pop(stand_in.untyped_storage()._cdata, None)


def load(parameter: torch.Tensor) -> torch.Tensor:
    """Copy the value of a parameter to new device memory; the parameter itself if its value is on
    the device."""
    value = _VALUES.get(parameter.untyped_storage()._cdata)
    if value is None:
        return parameter
    target = torch.empty_like(value, device=parameter.device, pin_memory=False)
    return target.copy_(value, non_blocking=True)
