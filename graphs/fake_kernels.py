"""What operators return on fake tensors, where PyTorch's rule is not that of its CPU kernel.

A trace runs on tensors without numbers, for which PyTorch has a rule beside each kernel. Where the
rule refuses what the kernel takes, or gives other strides, the traced step would not be eager's.
The rules here stand in for the time of a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

_ALIGNMENT_BYTES = 16
"""Rows of a grouped product begin at multiples of this."""
_GROUPED = torch.ops.aten._grouped_mm.default
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextlib.contextmanager
def cpu_rules() -> Iterator[None]:
    """Put the rules in place of PyTorch's; tensors on other devices still follow PyTorch's."""
    before = op_implementations_dict.get(_GROUPED)
    op_implementations_dict[_GROUPED] = _grouped_product
    try:
        yield
    finally:
        if before is None:
            op_implementations_dict.pop(_GROUPED, None)
        else:
            op_implementations_dict[_GROUPED] = before


def _grouped_product(
    mode: FakeTensorMode,
    operator: Any,
    one: torch.Tensor,
    other: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Products of groups of rows (mixtures of experts). PyTorch's rule knows bfloat16 alone and
    closes the gaps that align each row of the kernel's result.
    """
    if (
        one.device.type != "cpu"
        or one.dtype not in _GROUPED_DTYPES
        or other.dtype != one.dtype
        or out_dtype not in (None, one.dtype)
        or bias is not None
    ):
        return NotImplemented
    groups = () if offs is None else tuple(offs.shape)
    if one.dim() == other.dim() == 2:
        sizes = (*groups, one.shape[0], other.shape[1])
    elif one.dim() == other.dim() == 3:
        sizes = (one.shape[0], one.shape[1], other.shape[2])
    else:
        sizes = (one.shape[-2], other.shape[-1])
    unit = _ALIGNMENT_BYTES // one.element_size()
    row = -(-sizes[-1] // unit) * unit
    strides = (row * sizes[-2], row, 1)[-len(sizes) :]
    with mode:
        return torch.empty_strided(sizes, strides, dtype=one.dtype, device=one.device)
