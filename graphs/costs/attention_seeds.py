"""The random seeds that fused attention passes from its forward to its backward operator on CUDA.

By PyTorch's fake-tensor rules the seeds are on the device. In eager mode some kernels keep them on
the host, and their backward kernel crashes the process when it is given a device tensor. Only the
forward operator knows where the seeds are, so a backward operator is measured with seeds from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class _Pair:
    """An attention's forward operator and its seeds.

    forward: called with (query, key, value, the backward operator's arguments).
    made_at: positions of seed and offset among its results.
    read_at: their positions among the backward operator's arguments.
    """

    forward: Callable[..., Any]
    made_at: tuple[int, int]
    read_at: tuple[int, int]


def _flash(query: Any, key: Any, value: Any, args: tuple[Any, ...]) -> Any:
    dropout_p, is_causal = args[10], args[11]
    return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)


def _efficient(query: Any, key: Any, value: Any, args: tuple[Any, ...]) -> Any:
    bias, dropout_p, is_causal = args[4], args[9], (args[11] if len(args) > 11 else False)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal
    )


def _cudnn(query: Any, key: Any, value: Any, args: tuple[Any, ...]) -> Any:
    bias, dropout_p, is_causal = args[8], args[13], args[14]
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, True, dropout_p, is_causal
    )


_PAIRS = {
    "_scaled_dot_product_flash_attention_backward": _Pair(_flash, (6, 7), (12, 13)),
    "_scaled_dot_product_efficient_attention_backward": _Pair(_efficient, (2, 3), (7, 8)),
    "_scaled_dot_product_cudnn_attention_backward": _Pair(_cudnn, (6, 7), (6, 7)),
}


def real_seeds(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an attention's backward operator, with seeds from its forward operator.

    args: real tensors (gradient, query, key, value, ...). Those of other operators are returned
        unchanged.
    """
    packet = getattr(operator, "overloadpacket", None)
    pair = _PAIRS.get(getattr(packet, "__name__", ""))
    if pair is None or not isinstance(args[1], torch.Tensor) or not args[1].is_cuda:
        return args
    made = pair.forward(args[1], args[2], args[3], args)
    changed = list(args)
    for position, index in zip(pair.read_at, pair.made_at, strict=True):
        changed[position] = made[index]
    return tuple(changed)
