"""Picks the operators that PyTorch picks by asking the card or cuDNN, by PyTorch's own rules."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from graphs.capture.absent_card.attention_choice import AttentionCall, attention_of
from graphs.model_calls import TraceError

aten = torch.ops.aten
_AUTOGRAD = "AutogradCUDA"


@contextlib.contextmanager
def operators_of(compute_capability: tuple[int, int]) -> Iterator[None]:
    """While inside, fake CUDA tensors run the operators of a card of this compute capability."""
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _attention_kernel(compute_capability),
        "_batch_norm_impl_index": _batch_norm,
        **{
            f"{name}.{form}": _refusing_kernel(name)
            for name in _RECURRENT
            for form in ("input", "data")
        },
    }
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    patched = {
        (torch.cuda.amp.common, "amp_definitely_not_available"): lambda: False,
        (torch.cuda, "is_bf16_supported"): lambda *_, **__: compute_capability >= (8, 0),
        (torch.cuda, "get_device_capability"): lambda *_: compute_capability,
        # These two are called in builds with CUDA only.
        (torch.backends.cudnn, "is_acceptable"): lambda _: False,
        (torch._C, "_get_cudnn_batch_norm_reserve_space_size"): lambda *_: 0,
    }
    try:
        with contextlib.ExitStack() as stack:
            for (where, name), new in patched.items():
                stack.enter_context(mock.patch.object(where, name, new))
            with warnings.catch_warnings(action="ignore"):  # "already registered"
                for name, kernel in kernels.items():
                    library.impl(name, kernel, _AUTOGRAD)
                for name in _FUSED_ON_CUDA:
                    library.impl(name, _never_runs, "CUDA")
            yield
    finally:
        library._destroy()


_FUSED_ON_CUDA = ("silu_backward", "mish_backward", "_fused_rms_norm")
"""Operators that have a kernel on CUDA, and a composition of other operators for devices without a
kernel (native_functions.yaml). If no kernel is registered, PyTorch traces the composition."""


def _never_runs(*_args: Any) -> Any:
    """A kernel to register for `_FUSED_ON_CUDA`; fake tensors do not run it."""
    raise AssertionError("a kernel of CUDA was called without a card")


# ---- attention ----------------------------------------------------------------------------------

_FLASH_UNIT = 8
_MASK_UNIT = 8


def _attention_kernel(compute_capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    """`scaled_dot_product_attention`, as in aten/src/ATen/native/transformers/attention.cpp."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        tensors = (query, key, value)
        needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            is_causal=is_causal,
            shares_keys=enable_gqa,
            needs_gradient=needs_gradient,
            compute_capability=compute_capability,
        )
        backend = attention_of(call)
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            # convert_boolean_attn_mask: the mask becomes numbers that are added to the scores.
            is_cudnn = backend == SDPBackend.CUDNN_ATTENTION
            lowest = torch.finfo(query.dtype).min if is_cudnn else -math.inf
            low = torch.scalar_tensor(lowest, dtype=query.dtype, device=mask.device)
            mask = torch.where(mask, 0.0, low)
        if backend == SDPBackend.CUDNN_ATTENTION:
            options: tuple[Any, ...] = (mask, needs_gradient, dropout_p, is_causal, False)
            out = aten._scaled_dot_product_cudnn_attention(*tensors, *options, scale=scale)
        elif backend == SDPBackend.FLASH_ATTENTION:
            size = query.shape[-1]
            padded = (_padded(each, _FLASH_UNIT) for each in tensors)
            scale = 1 / math.sqrt(size) if scale is None else scale
            out = aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=scale
            )
            return out[0] if size % _FLASH_UNIT == 0 else out[0][..., :size]  # type: ignore[no-any-return]
        elif backend == SDPBackend.EFFICIENT_ATTENTION:
            if mask is not None:  # preprocess_mask: rows begin at multiples of 8 elements
                *outer, last = mask.stride()
                if last != 1 or any(stride % _MASK_UNIT for stride in outer):
                    mask = _padded(mask, _MASK_UNIT)[..., : mask.shape[-1]]
                mask = mask.expand(*query.shape[:3], key.shape[2])
            options = (mask, needs_gradient, dropout_p, is_causal)
            out = aten._scaled_dot_product_efficient_attention(*tensors, *options, scale=scale)
        else:
            options = (mask, dropout_p, is_causal, None)
            out = aten._scaled_dot_product_attention_math(
                *tensors, *options, scale=scale, enable_gqa=enable_gqa
            )
        return out[0]  # type: ignore[no-any-return]

    return attention


def _padded(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    rest = -tensor.shape[-1] % unit
    return functional.pad(tensor, (0, rest)) if rest else tensor


# ---- batch norm ---------------------------------------------------------------------------------

_MOST_IMAGES = {True: 880801, False: 65535}
"""Largest batch for which cuDNN is used, by whether the step is in training mode."""
_CUDNN_KERNEL = 1


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """`_batch_norm_impl_index`, as in aten/src/ATen/native/Normalization.cpp."""
    has_valid_statistics = (mean is None) == (variance is None) and (mean is not None or training)
    uses_cudnn = (
        cudnn_enabled
        and torch._C._get_cudnn_enabled()
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype != torch.float16 or weight.dtype == torch.float32)
        and has_valid_statistics
        and x.dim() >= 3
        and x.shape[0] <= _MOST_IMAGES[training]
    )
    if not uses_cudnn:
        out = aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
        return *out, x.new_empty(0, dtype=torch.uint8), 0
    layout = torch.contiguous_format
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    out = aten.cudnn_batch_norm(
        x.contiguous(memory_format=layout), weight, bias, mean, variance, training, momentum, eps
    )
    return *out, _CUDNN_KERNEL


# ---- recurrent layers ---------------------------------------------------------------------------

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _refusing_kernel(name: str) -> Callable[..., Sequence[torch.Tensor]]:
    def refuse(*_args: Any, **_kwargs: Any) -> Sequence[torch.Tensor]:
        raise TraceError(
            f"{name} runs in cuDNN on a card, and only cuDNN knows what it saves for backward: "
            "plan on a machine with the card",
            short=f"{name} runs in cuDNN, which is not on this machine",
        )

    return refuse
