"""Refuses to trace what PyTorch runs on its fast path of attention, which a trace never takes.

`nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` call one fused
operator in evaluation mode where no gradient is wanted, but not while a tracer is active: other
operators, other last bits. Here their own conditions decide as if there were no tracer, and the
fused operators raise TraceError, so that the module becomes a part that runs in eager mode.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from graphs.model_calls import TraceError

_FUSED = (
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "_nested_tensor_from_mask",
)


@contextlib.contextmanager
def refuse_fast_path() -> Iterator[None]:
    """Raise TraceError where eager mode takes the fast path, while inside and in this thread."""
    here = threading.get_ident()

    def instead(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (ours if threading.get_ident() == here else original)(*args, **kwargs)

        return call

    def no(*_args: Any) -> bool:
        return False

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.overrides, "has_torch_function", no),
        (nn.modules.activation, "_is_make_fx_tracing", no),
        *((torch, name, _refuse) for name in _FUSED),
    ]
    with contextlib.ExitStack() as stack:
        for where, name, ours in replaced:
            new = instead(getattr(where, name), ours)
            stack.enter_context(mock.patch.object(where, name, new))
        yield


def _refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise TraceError(
        "attention takes PyTorch's fast path in evaluation mode, which cannot be traced; "
        "torch.backends.mha.set_fastpath_enabled(False) turns it off",
        runs_in_eager=True,
        short="takes PyTorch's fast path in evaluation mode, which cannot be traced",
    )
