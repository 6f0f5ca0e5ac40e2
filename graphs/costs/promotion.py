"""Workspace of element-wise operators and reductions on the CPU whose tensors differ in dtype.

ATen's TensorIterator computes in one dtype. On the CPU it first converts copies of inputs of
another dtype. If it may not write the result's dtype directly (the absolute value of complex
numbers), it computes into a temporary result (ATen/TensorIterator.cpp, `compute_types`). On CUDA
the kernels convert while they read and write. A number becomes a tensor of 64 bits first, also on
CUDA in the host's memory, and is converted like the others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from graphs.costs.operators import OpCall, aten
from graphs.model_calls import named_arguments

_CONVERTS = {aten._to_copy, aten.copy, aten.copy_, aten.clone}
"""Operators whose purpose is to read one dtype and write another; they convert without copies."""

_MASK: Mapping[Any, int] = {aten.where: 0, aten.masked_fill: 1}
"""Position of the mask argument, which is not converted."""

_REDUCTIONS = {
    *(aten.sum, aten.mean, aten.prod, aten.cumsum, aten.cumprod, aten.linalg_vector_norm),
}


_NUMBER_BYTES, _FLOAT32_BYTES = 8, 4

_OPERANDS = ("self", "other")
"""Names of the arguments that are operands; other numbers (an exponent, a limit) stay numbers."""


def promotion_bytes(call: OpCall) -> int:
    """Bytes of the copies that the call converts to the dtype that it computes in."""
    return _converted_bytes(call) + _numbers_bytes(call)


def _numbers_bytes(call: OpCall) -> int:
    """The bytes of an operand that is a number. A mean divides by a number in place."""
    outputs = call.outputs()
    is_mean = call.packet is aten.mean
    if not outputs or not (is_mean or torch.Tag.pointwise in getattr(call.target, "tags", ())):
        return 0
    if not is_mean:
        given = named_arguments(call.target, call.args, call.kwargs)
        if not any(isinstance(given.get(name), int | float | complex) for name in _OPERANDS):
            return 0
    return number_bytes(*outputs, *call.inputs())


def number_bytes(*tensors: torch.Tensor) -> int:
    """At most the bytes of the tensors that a number becomes in an operation with these."""
    return _NUMBER_BYTES + max(each.element_size() for each in tensors)


def mean_bytes(x: torch.Tensor, mean: torch.Tensor) -> int:
    """Of a mean in 16 bits: it is computed from a copy in 32 bits, and is a sum in 32 bits first.
    (One element more: the mean of a loss, beside the result.)"""
    if x.element_size() >= _FLOAT32_BYTES:
        return 0
    return (x.numel() + mean.numel()) * _FLOAT32_BYTES + mean.element_size()


def _converted_bytes(call: OpCall) -> int:
    outputs = call.outputs()
    if len(outputs) != 1 or call.packet in _CONVERTS:
        return 0
    (out,) = outputs
    if call.packet in _REDUCTIONS:
        x: torch.Tensor = call.args[0]
        if call.packet is aten.mean and out.element_size() < _FLOAT32_BYTES:
            return mean_bytes(x, out)
        return 0 if x.dtype == out.dtype else x.numel() * out.element_size()
    if torch.Tag.pointwise not in getattr(call.target, "tags", ()):
        return 0
    mask = _MASK.get(call.packet)
    args = [each for at, each in enumerate(call.args) if at != mask]
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    inputs = [each for each in tensors if each.dim()]
    if not inputs:
        return 0
    # all are converted to the common dtype, which 0-dim tensors do not decide; a real result of
    # complex inputs is first computed as a complex one
    common = functools.reduce(torch.promote_types, [each.dtype for each in inputs])
    if out.dtype != torch.bool:
        common = torch.promote_types(common, out.dtype)
    copied = [each.numel() for each in tensors if each.dtype != common]
    if common.is_complex and not (out.dtype.is_complex or out.dtype == torch.bool):
        copied.append(out.numel())
    return sum(copied) * common.itemsize
