"""What CPU kernels return on fake tensors, where PyTorch's rule says something else.

A trace runs on tensors without numbers, for which PyTorch has a rule beside each kernel. Where the
rule refuses what the CPU kernel takes, or gives other strides or another storage, the traced step
would not be eager's. `cpu_kernel_result` goes before these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten
_ROW_BYTES = 16
"""Rows of a grouped product begin at multiples of this."""
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOT_REDUCED = 0


def cpu_kernel_result(
    mode: FakeTensorMode, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """The fake result of an operator on CPU tensors; NotImplemented: PyTorch's rule is right."""
    rule = _RULES.get(operator)
    if rule is None or not all(isinstance(item, FakeTensor) for item in args[:2]):
        return NotImplemented
    if any(item.device.type != "cpu" for item in args[:2]):
        return NotImplemented
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    with mode:
        return rule(args[0], args[1], given)


def _grouped_product(one: torch.Tensor, other: torch.Tensor, given: Mapping[str, Any]) -> Any:
    """Products of groups of rows (mixtures of experts): PyTorch's rule knows bfloat16 alone and
    closes the gaps by which the kernel aligns each row of the result.
    """
    dtype = one.dtype
    if dtype not in _GROUPED_DTYPES or other.dtype != dtype or given.get("bias") is not None:
        return NotImplemented
    if given.get("out_dtype") not in (None, dtype):
        return NotImplemented
    offsets = given.get("offs")
    sizes: tuple[int, ...] = (one.shape[-2], other.shape[-1])
    if one.dim() == other.dim():
        groups = one.shape[0] if one.dim() == 3 or offsets is None else offsets.shape[0]
        sizes = (groups, *sizes)
    unit = _ROW_BYTES // one.element_size()
    row = -(-sizes[-1] // unit) * unit
    strides = (row * sizes[-2], row, 1)[-len(sizes) :]
    return torch.empty_strided(sizes, strides, dtype=dtype, device=one.device)


def _reduced_loss(one: torch.Tensor, other: torch.Tensor, given: Mapping[str, Any]) -> Any:
    """A loss whose kernel computes all terms in the storage of its result: one number, which holds
    the bytes of all of them for as long as it lives.
    """
    same = one.shape == other.shape and one.dtype == other.dtype
    if given.get("reduction") == _NOT_REDUCED or not same or one.numel() == 0:
        return NotImplemented
    return torch.empty(one.shape, dtype=one.dtype, device=one.device).as_strided((), ())


_Rule = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], Any]
_REDUCED_LOSSES = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)
_RULES: dict[Any, _Rule] = {
    aten._grouped_mm.default: _grouped_product,
    **dict.fromkeys(_REDUCED_LOSSES, _reduced_loss),
}
