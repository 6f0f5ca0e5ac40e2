"""Workspace of element-wise operators and reductions on the CPU whose tensors differ in dtype.

ATen's TensorIterator computes in one dtype. On the CPU it first converts copies of inputs of
another dtype. If it may not write the result's dtype directly (the absolute value of complex
numbers), it computes into a temporary result (ATen/TensorIterator.cpp, `compute_types`). On CUDA
the kernels convert while they read and write.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from graphs.costs.operators import OpCall, aten

_CONVERTS = {aten._to_copy, aten.copy, aten.copy_, aten.clone}
"""Operators whose purpose is to read one dtype and write another; they convert without copies."""

_MASK: Mapping[Any, int] = {aten.where: 0, aten.masked_fill: 1}
"""Position of the mask argument, which is not converted."""

_REDUCTIONS = {
    *(aten.sum, aten.mean, aten.prod, aten.cumsum, aten.cumprod, aten.linalg_vector_norm),
}


def promotion_bytes(call: OpCall) -> int:
    """Bytes of the copies that the call converts to the dtype that it computes in."""
    outputs = call.outputs()
    if len(outputs) != 1 or call.packet in _CONVERTS:
        return 0
    (out,) = outputs
    if call.packet in _REDUCTIONS:
        x: torch.Tensor = call.args[0]
        return 0 if x.dtype == out.dtype else x.numel() * out.element_size()
    if torch.Tag.pointwise not in getattr(call.target, "tags", ()):
        return 0
    mask = _MASK.get(call.packet)
    args = [each for at, each in enumerate(call.args) if at != mask]
    inputs = [each for each in args if isinstance(each, torch.Tensor) and each.dim()]
    if not inputs:
        return 0
    # inputs (0-dim tensors aside) are converted to the common dtype; a real result of complex
    # inputs is first computed as a complex one
    common = functools.reduce(torch.promote_types, [each.dtype for each in inputs])
    if out.dtype != torch.bool:
        common = torch.promote_types(common, out.dtype)
    copied = [each.numel() for each in inputs if each.dtype != common]
    if common.is_complex and not (out.dtype.is_complex or out.dtype == torch.bool):
        copied.append(out.numel())
    return sum(copied) * common.itemsize
