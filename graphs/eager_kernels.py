"""Trace the operators that eager mode runs, not the decompositions that compilers prefer.

While PyTorch traces, some operators are replaced by Python decompositions even where none was asked
for: dropout by its fused form (other bits in half precision on the CPU, and a smaller mask than
eager keeps), upsampling by index arithmetic. A plan must run what eager runs, to the bit, and count
what eager holds. So these registrations are set aside while a step is captured.

Batch norm keeps its decomposition: the eager kernels write the running statistics without saying so
in their signature, and the decomposition is what makes that visible (and gives the same bits).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_UPSAMPLING = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)


_library = torch.library.Library("checkpoint_solver", "DEF")
_library.define(
    "dropout_noise(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)


def _dropout_noise(like: torch.Tensor, p: float) -> torch.Tensor:
    """What eager dropout multiplies by, filled in the order of the input's strides."""
    return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)


_library.impl("dropout_noise", _dropout_noise, "CPU")
_library.impl("dropout_noise", lambda like, _p: torch.empty_like(like), "Meta")


def _eager_dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout as eager mode computes it on the CPU.

    Its in-place steps are one operator here: taken apart they would be functionalised into others,
    whose noise is contiguous whatever the input's strides are, and so falls on other elements.
    """
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    noise: torch.Tensor = torch.ops.checkpoint_solver.dropout_noise(tensor.detach(), p)
    return tensor * noise


@contextlib.contextmanager
def eager_kernels(device: torch.device) -> Iterator[None]:
    """Set the decompositions aside that differ from eager mode on this device."""
    operators = [
        overload
        for name in _UPSAMPLING
        for overload in (getattr(torch.ops.aten, name).vec, getattr(torch.ops.aten, name).default)
    ]
    removed = [
        (operator, key, operator.py_kernels.pop(key))
        for operator in operators
        for key in _KEYS
        if key in operator.py_kernels
    ]
    if device.type == "cpu":  # on CUDA eager runs the fused dropout too
        dropout = torch.ops.aten.dropout.default
        removed += [(dropout, key, dropout.py_kernels[key]) for key in _KEYS]
        for key in _KEYS:
            dropout.py_kernels[key] = _eager_dropout
    for operator, _, _ in removed:
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in removed:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
