"""Casts each weight once under autocast, as eager mode does.

Eager autocast caches the low-precision copy of a float32 leaf that requires a gradient until the
outermost autocast context ends. A weight that is used twice is then cast once, and its gradients
are summed in low precision before they are cast back. While PyTorch traces, no tensor is a leaf, so
the cache stays empty, each use casts, and the gradients are summed in float32: different bits.

So for the duration of one forward pass, the operators that autocast runs in low precision are
wrapped at the autocast dispatch key: an argument that stands for a leaf is replaced by the copy
that its first use made. Autocast itself casts all other arguments.

As in eager mode, the cache is keyed by tensor alone, and the end of the outermost autocast context
clears it. A planned module does not share the cache beyond its own call: a weight that is also used
outside of the module, or by two calls in one autocast context, is cast once more than in eager
mode.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

#: Operators that autocast runs in low precision, on any device (PyTorch's autocast op reference).
_LOW_PRECISION = """
    _addmm_activation _convolution _convolution.deprecated _native_multi_head_attention
    _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm
    addmm addmv addr baddbmm bmm chain_matmul conv1d conv1d.padding conv2d conv2d.padding
    conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot linalg_vecdot linear
    lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
"""
LOW_PRECISION = tuple(_LOW_PRECISION.split())
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@contextlib.contextmanager
def casts_once(leaves: Sequence[torch.Tensor], *, cache_enabled: bool) -> Iterator[None]:
    """While inside, make autocast cache the low-precision copies of these tensors.

    leaves: traced tensors that stand for the leaves of eager mode.
    cache_enabled: the caller's `torch.is_autocast_cache_enabled()`, before tracing turned it off.
    """
    leaf_ids = {id(leaf) for leaf in leaves if leaf.dtype == torch.float32 and leaf.requires_grad}
    kinds = {leaf.device.type for leaf in leaves} & _KEYS.keys()
    copies: dict[int, torch.Tensor] = {}
    original_clear = torch.clear_autocast_cache

    def forget_copies() -> None:
        copies.clear()
        original_clear()

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", forget_copies))
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(cache_enabled)
        for kind in sorted(kinds):
            cast_argument = _cast_function(leaf_ids, copies, kind=kind)
            stack.enter_context(_wrap_low_precision_kernels(cast_argument, key=_KEYS[kind]))
        yield


def _cast_function(
    leaf_ids: set[int], copies: dict[int, torch.Tensor], *, kind: str
) -> Callable[[Any], Any]:
    """Make the function that replaces an operator's argument by its cached copy, if it has one.

    leaf_ids: ids of the tensors to cache.
    copies: the cache, by the same ids; filled by the function.
    kind: type of the device.
    """

    def cast_argument(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(cast_argument(item) for item in argument)
        if id(argument) not in leaf_ids or not torch.is_autocast_cache_enabled():
            return argument
        if id(argument) not in copies:
            copies[id(argument)] = argument.to(torch.get_autocast_dtype(kind))
        return copies[id(argument)]

    return cast_argument


@contextlib.contextmanager
def _wrap_low_precision_kernels(cast_argument: Callable[[Any], Any], *, key: str) -> Iterator[None]:
    """While inside, pass the arguments of low-precision operators through `cast_argument`.

    key: the autocast dispatch key at which their kernels are wrapped.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(key))
    try:
        for name in LOW_PRECISION:
            if f"aten::{name}" in registered:
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                kernel = torch.library.get_kernel(operator, key)

                def call(keys: Any, *args: Any, _kernel: Any = kernel, **kwargs: Any) -> Any:
                    args = tuple(cast_argument(argument) for argument in args)
                    kwargs = {name: cast_argument(argument) for name, argument in kwargs.items()}
                    return _kernel.call_boxed(keys, *args, **kwargs)

                with warnings.catch_warnings(action="ignore"):  # "already registered"
                    library.impl(name, call, key, with_keyset=True)
        yield
    finally:
        library._destroy()
