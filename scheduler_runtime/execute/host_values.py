"""The values of parameters that are in host memory, for the program that reads them.

While its value is away a parameter has another tensor in its place: one number, NaN, as large as
the parameter by strides of 0. Autograd and the optimizer see the parameter's shape, dtype and
device, and whoever reads it by mistake gets NaN, not other values. A program knows the value by the
memory of that tensor.
"""

from __future__ import annotations

import torch

_VALUES: dict[int, torch.Tensor] = {}
"""Address of the one number's storage -> the value in host memory."""


def stand_in_for(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What takes the parameter's place. value: in host memory, until `forget`."""
    number = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    _VALUES[number.untyped_storage()._cdata] = value
    return number.expand(parameter.shape)


def is_stand_in(tensor: torch.Tensor, stand_in: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == stand_in.untyped_storage()._cdata)


def forget(stand_in: torch.Tensor) -> None:
    _VALUES.pop(stand_in.untyped_storage()._cdata, None)


def load(parameter: torch.Tensor) -> torch.Tensor:
    """The value in new memory of the device; the parameter itself where its value is there."""
    value = _VALUES.get(parameter.untyped_storage()._cdata)
    if value is None:
        return parameter
    target = torch.empty_like(value, device=parameter.device, pin_memory=False)
    return target.copy_(value, non_blocking=True)
