"""Refuses to trace attention modules that take PyTorch's fast path in eager mode.

In evaluation mode, if no gradient is needed, `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`
and `nn.TransformerEncoder` call one fused operator. While a tracer is active they never do, so a
trace would have other operators and other last bits. Here the modules' own conditions decide as if
there were no tracer, and the fused operators raise TraceError, so that the module becomes an opaque
part, which runs in eager mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from graphs.capture.threads import in_this_thread
from graphs.model_calls import TraceError

_FUSED = (
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "_nested_tensor_from_mask",
)


@contextlib.contextmanager
def refuse_fast_path() -> Iterator[None]:
    """While inside, raise TraceError in this thread if eager mode would take the fast path."""

    def returns_false(*_args: Any) -> bool:
        return False

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.overrides, "has_torch_function", returns_false),
        (nn.modules.activation, "_is_make_fx_tracing", returns_false),
        *((torch, name, _refuse_fused) for name in _FUSED),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            new = in_this_thread(replacement, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, new))
        yield


def _refuse_fused(*_args: Any, **_kwargs: Any) -> Any:
    raise TraceError(
        "attention takes PyTorch's fast path in evaluation mode, which cannot be traced; "
        "torch.backends.mha.set_fastpath_enabled(False) turns it off",
        runs_in_eager=True,
        short="takes PyTorch's fast path in evaluation mode, which cannot be traced",
    )
