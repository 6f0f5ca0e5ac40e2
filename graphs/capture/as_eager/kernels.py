"""Makes a trace record the operators that eager mode runs, not decompositions of them.

While PyTorch traces, it replaces some operators by Python decompositions even if none was asked
for: dropout by its fused form (different bits in half precision on the CPU, and a smaller mask than
eager mode keeps), upsampling by index arithmetic. A plan must run what eager mode runs, bitwise
identical, and count what it allocates. So these registrations are removed while a step is captured.

In a trace, in-place random fills (`x.normal_()`) become new tensors. If x has gaps or is
transposed, the new tensor has other strides, and the same numbers would go to other elements. On
the CPU, custom operators fill such tensors in eager mode's order. Two limits: on CUDA, fills of
non-contiguous tensors have not been compared with eager mode, and `out=` of a random operator must
be contiguous.

Batch norm keeps its decomposition: the eager kernels write the running statistics without declaring
it in their schema; the decomposition makes the writes visible, and is bitwise identical. If eager
mode runs cuDNN's kernel (on CUDA, in training), an operator is used that declares the writes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import _disable_current_modes

from graphs.capture.as_eager import rnn
from graphs.capture.as_eager.gradients import eager_gradient_kernels
from graphs.capture.own_operators import define
from graphs.capture.refuse import own_generator_error
from graphs.model_calls import strided_like

logger = logging.getLogger(__name__)

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_UPSAMPLING = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_LOSSES = ("multi_margin_loss", "multilabel_margin_loss_forward")
"""Losses whose decompositions sum the terms in another order."""
_PRODUCT_OF_MATRICES = (torch.ops.aten.matmul.default, torch.ops.aten.matmul.out)
"""Its decomposition chooses between one product (mm) and a batch of products (bmm) by other rules
than eager mode: the choice differs for a frozen weight with rows of a longer sequence, or with part
of the columns."""
_FOURIER = (torch.ops.aten.stft.center, torch.ops.aten.istft.default)
"""The gradient of istft's decomposition has other strides than in eager mode."""
_SHRINKS = ("softshrink", "hardshrink")
"""Eager mode saves their input for backward; their decompositions save a mask."""


def _dropout_noise(
    size: Sequence[int],
    stride: Sequence[int],
    p: float,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """What eager dropout multiplies its input by, filled in the order of the strides."""
    noise = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return noise if noise.is_meta else noise.bernoulli_(1 - p).div_(1 - p)


# It takes no tensor, so it can be recomputed after dropout's input has been freed.
_NOISE = define(
    "dropout_noise(int[] size, int[] stride, float p, *, ScalarType dtype, Device device)"
    " -> Tensor",
    is_random=True,
    CompositeExplicitAutograd=_dropout_noise,
)


def _eager_dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout as eager mode computes it on the CPU.

    The in-place steps that make the noise are one operator here. Traced one by one they would be
    functionalised; the noise would then be contiguous whatever the input's strides are, and its
    numbers would go to other elements.
    """
    if p == 0 or not train or tensor.numel() == 0:
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    with _disable_current_modes():  # the strides of `empty_like`, without a call that is traced
        form = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        strides = torch.empty_like(form).stride()
    noise: torch.Tensor = _NOISE(tensor.shape, strides, p, dtype=tensor.dtype, device=tensor.device)
    return tensor * noise


_AUTOGRAD = DispatchKey.AutogradCPU


def _fill_kernel(
    operator: torch._ops.OpOverload,
    schema: str,
    fill: Callable[..., object],
    *,
    as_traced: bool = True,
) -> Callable[..., torch.Tensor]:
    """A kernel for an in-place random operator. It calls an operator of ours, which fills a tensor
    of the same form in the order of eager mode.

    schema: of that operator.
    fill: fills a tensor in place.
    as_traced: whether contiguous tensors are filled as PyTorch traces the operator, which takes
        one tensor less.
    """
    filled = define(
        f"{schema} -> Tensor",
        is_random=True,
        CPU=lambda like, *args: fill(strided_like(like), *args),
        Meta=lambda like, *_: strided_like(like),
    )
    *options, _generator = operator._schema.arguments[1:]
    defaults = {option.name: option.default_value for option in options}

    def kernel(
        tensor: torch.Tensor, *args: Any, generator: torch.Generator | None = None, **named: Any
    ) -> torch.Tensor:
        if generator is not None:
            raise own_generator_error(operator)
        if as_traced and tensor.is_contiguous():
            return operator._op_dk(_AUTOGRAD, tensor, *args, **named)  # type: ignore[no-any-return]
        arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **named}
        return tensor.copy_(filled(tensor.detach(), *arguments.values()))

    return kernel


_bernoulli = torch.ops.aten.bernoulli_.float
_normal = torch.ops.aten.normal_.default
_random = getattr(torch.ops.aten.random_, "from")
_FILLS: Mapping[torch._ops.OpOverload, Callable[..., torch.Tensor]] = {
    _bernoulli: _fill_kernel(
        _bernoulli, "bernoulli_fill(Tensor like, float p)", torch.Tensor.bernoulli_
    ),
    _normal: _fill_kernel(
        _normal, "normal_fill(Tensor like, float mean, float std)", torch.Tensor.normal_
    ),
    # PyTorch's functional form is called `from`, a keyword that breaks its own generated code
    _random: _fill_kernel(
        _random,
        "random_fill(Tensor like, int low, int? high)",
        torch.Tensor.random_,
        as_traced=False,
    ),
}


_cudnn_batch_norm = torch.ops.aten.cudnn_batch_norm.default
_Tensors = tuple[torch.Tensor, ...]


def _eager_cudnn_batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    factor: float,
    eps: float,
) -> _Tensors:
    """cuDNN's batch norm as an operator whose schema declares that the statistics are written.

    That operator chooses between cuDNN's kernel and PyTorch's own by the same function as eager
    mode.
    """
    if training and mean is not None and variance is not None:
        updating: Callable[..., _Tensors] = torch.ops.aten._batch_norm_with_update.default
        try:
            return updating(tensor, weight, bias, mean, variance, factor, eps)
        except RuntimeError as error:
            # only cuDNN knows how many bytes it saves for backward
            logger.warning(
                "cuDNN's batch norm cannot be traced (%s); PyTorch's own kernel is planned "
                "instead, whose last bits may differ from eager mode's",
                error,
            )
    kernel: Callable[..., _Tensors] = torch._decomp.decompositions.cudnn_batch_norm
    return kernel(tensor, weight, bias, mean, variance, training, factor, eps)


@contextlib.contextmanager
def eager_kernels(device: torch.device) -> Iterator[None]:
    """While inside, remove or replace decompositions that differ from eager mode on this device."""
    replaced: dict[tuple[torch._ops.OpOverload, DispatchKey], Callable[..., Any] | None]
    replaced = {
        (getattr(getattr(torch.ops.aten, name), overload), key): None
        for name in _UPSAMPLING.split()
        for overload in ("vec", "default")
        for key in _KEYS
    }
    replaced |= {
        (getattr(torch.ops.aten, name).default, key): None
        for name in (*_LOSSES, *_SHRINKS)
        for key in _KEYS
    }
    replaced |= {
        (operator, DispatchKey.CompositeImplicitAutograd): None
        for operator in (*_PRODUCT_OF_MATRICES, *_FOURIER)
    }
    key = DispatchKey.AutogradCUDA if device.type == "cuda" else _AUTOGRAD
    replaced |= {
        (operator, key): kernel for operator, kernel in eager_gradient_kernels(device).items()
    }
    if device.type == "cuda":
        replaced[_cudnn_batch_norm, DispatchKey.Autograd] = _eager_cudnn_batch_norm
    if device.type == "cpu":  # on CUDA eager runs the fused dropout too
        replaced |= {(torch.ops.aten.dropout.default, key): _eager_dropout for key in _KEYS}
        replaced |= {(operator, _AUTOGRAD): kernel for operator, kernel in _FILLS.items()}
        replaced |= {(op, key): run for op, run in rnn.KERNELS.items() for key in _KEYS}
    before = {(operator, key): operator.py_kernels.get(key) for operator, key in replaced}
    _register(replaced)
    try:
        yield
    finally:
        _register(before)


def _register(
    kernels: Mapping[tuple[torch._ops.OpOverload, DispatchKey], Callable[..., Any] | None],
) -> None:
    """Register each kernel; None removes what is registered there."""
    for (operator, key), kernel in kernels.items():
        if kernel is None:
            operator.py_kernels.pop(key, None)
        else:
            operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
