"""Which kernel `scaled_dot_product_attention` runs on a card, by PyTorch's rules.

The rules are those of `select_sdp_backend` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
for dense tensors in builds with CUDA 12 or newer and cuDNN 9.15 or newer, such as the official
wheels of torch 2.11 to 2.13. The settings of this process count:
`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`,
TORCH_CUDNN_SDPA_DEPRIORITIZED.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

_HALF = (torch.float16, torch.bfloat16)
_DEFAULT_ORDER = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)
_CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_NEWEST_CAPABILITY = (12, 1)
"""The newest compute capability that the fused kernels are built for."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call on which the choice of the kernel depends.

    query, key, value: (batch, heads, tokens, head size).
    shares_keys: `enable_gqa`: whether several query heads may share a key head.
    needs_gradient: whether query, key or value needs a gradient.
    compute_capability: of the card, (major, minor).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    shares_keys: bool
    needs_gradient: bool
    compute_capability: tuple[int, int]

    def has_capability(
        self, first: tuple[int, int], last: tuple[int, int] = _NEWEST_CAPABILITY
    ) -> bool:
        """Whether the card's compute capability is in this range, both ends included."""
        return first <= self.compute_capability <= last


def attention_of(call: AttentionCall) -> SDPBackend:
    """The kernel that PyTorch picks. Raises RuntimeError if none is possible, as PyTorch does."""
    order = tuple(SDPBackend(each) for each in torch._C._get_sdp_priority_order())
    if order[: len(_DEFAULT_ORDER)] == _DEFAULT_ORDER:
        # The user has not set an order: cuDNN comes first on data centre cards of compute
        # capability 9.0 and 10.0 (check_prefer_cudnn_attention).
        is_cudnn_last = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") not in ("0", "")
        prefers_cudnn = call.compute_capability in ((9, 0), (10, 0)) and not is_cudnn_last
        order = _CUDNN_FIRST if prefers_cudnn else _DEFAULT_ORDER
    for backend in order:
        if backend in _RULES and _RULES[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _can_use_cudnn(call: AttentionCall) -> bool:
    """PyTorch's can_use_cudnn_attention."""
    largest = 256 if call.compute_capability == (9, 0) else 128
    sizes = (call.query.shape[-1], call.value.shape[-1])
    is_strict = torch.are_deterministic_algorithms_enabled()
    return (
        _is_enabled("cudnn")
        and _are_dense(call)
        and not (is_strict and not torch.is_deterministic_algorithms_warn_only_enabled())
        and _is_half(call)
        and _takes_mask(call)
        and call.has_capability((8, 0))
        and _ends_in_stride_1(call, ignore_single=True)
        and _has_same_heads(call, may_share=True, of_value_too=False)
        and all(size <= largest and size % 8 == 0 for size in sizes)
        and call.key.shape[2] != 1
        and not (call.query.shape[2] == 1 and call.dropout > 0)
    )


def _can_use_flash(call: AttentionCall) -> bool:
    """PyTorch's can_use_flash_attention."""
    size = call.query.shape[-1]
    is_small_card = call.has_capability((8, 6), (8, 9)) or call.has_capability((12, 0), (12, 1))
    is_refused = 192 < size <= 224 or (size > 224 and call.dropout > 0)
    return (
        _is_enabled("flash")
        and _are_dense(call)
        and call.mask is None
        and {call.key.shape[-1], call.value.shape[-1]} == {size}
        and size <= 256
        and call.has_capability((8, 0))
        and not (call.needs_gradient and is_small_card and is_refused)
        and not (call.is_causal and call.query.shape[2] != call.key.shape[2])
        and _is_half(call)
        and _has_same_heads(call, may_share=True)
        and _ends_in_stride_1(call, ignore_single=True)
    )


def _can_use_efficient(call: AttentionCall) -> bool:
    """PyTorch's can_use_mem_efficient_attention."""
    is_half = call.query.dtype in _HALF
    unit = 8 if is_half else 4 if call.has_capability((8, 0)) else 1
    dtypes = (
        (*_HALF, torch.float32) if call.has_capability((8, 0)) else (torch.float16, torch.float32)
    )
    return (
        _is_enabled("mem_efficient")
        and call.has_capability((5, 0))
        and _are_dense(call)
        and call.query.shape[-1] == call.key.shape[-1]
        and all(x.shape[-1] % unit == 0 and x.shape[-1] > 0 for x in (call.query, call.value))
        and _ends_in_stride_1(call, ignore_single=False)
        and _has_same_heads(call, may_share=False)
        and {call.query.dtype, call.key.dtype, call.value.dtype} == {call.query.dtype}
        and call.query.dtype in dtypes
    )


_RULES: Mapping[SDPBackend, Callable[[AttentionCall], bool]] = {
    SDPBackend.CUDNN_ATTENTION: _can_use_cudnn,
    SDPBackend.FLASH_ATTENTION: _can_use_flash,
    SDPBackend.EFFICIENT_ATTENTION: _can_use_efficient,
    SDPBackend.MATH: lambda _call: _is_enabled("math"),
}


def _is_enabled(kernel: str) -> bool:
    """Whether the kernel is on; `sdpa_kernel` and `enable_flash_sdp(False)` turn kernels off."""
    return bool(getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")())


def _are_dense(call: AttentionCall) -> bool:
    """PyTorch's check_tensor_shapes and check_nonzero_sequence_lengths_dense."""
    return (
        call.query.dim() == call.key.dim() == call.value.dim() == 4
        and call.query.shape[-2] > 0
        and call.key.shape[-2] > 0
    )


def _is_half(call: AttentionCall) -> bool:
    """PyTorch's check_dtypes_low_precision."""
    dtypes = {call.query.dtype, call.key.dtype, call.value.dtype}
    allowed = _HALF if call.has_capability((8, 0)) else (torch.float16,)
    return len(dtypes) == 1 and call.query.dtype in allowed


def _takes_mask(call: AttentionCall) -> bool:
    """PyTorch's check_attn_mask_shape."""
    if call.mask is None:
        return True
    if call.mask.requires_grad:
        return False
    full_shape = (*call.query.shape[:2], call.query.shape[2], call.key.shape[2])
    shape = call.mask.shape
    fits = all(own in (1, size) for own, size in zip(shape[::-1], full_shape[::-1], strict=False))
    return fits and len(shape) in (2, 4)


def _has_same_heads(call: AttentionCall, *, may_share: bool, of_value_too: bool = True) -> bool:
    """PyTorch's check_batch_size_and_num_heads_dense."""
    if not call.query.shape[0] == call.key.shape[0] == call.value.shape[0]:
        return False
    heads, of_key, of_value = (x.shape[-3] for x in (call.query, call.key, call.value))
    if call.shares_keys and may_share:
        if of_value_too and of_key != of_value:
            return False
        return heads % of_key == 0 and heads % of_value == 0
    return bool(heads == of_key == of_value)


def _ends_in_stride_1(call: AttentionCall, *, ignore_single: bool) -> bool:
    """PyTorch's check_last_dim_stride_equals_1_dense."""
    if call.mask is not None and call.mask.stride(-1) != 1:
        return False
    if ignore_single and call.query.shape[-1] == 1:
        return True
    return all(x.stride(-1) == 1 for x in (call.query, call.key, call.value))
