"""Which calls draw random numbers."""

from __future__ import annotations

import torch


def is_random(node: torch.fx.Node) -> bool:
    """Whether the call draws from a random generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not _is_attention_without_dropout(node)


_CUDA_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def _is_attention_without_dropout(node: torch.fx.Node) -> bool:
    """Fused attention on CUDA draws no numbers then, although the operator is tagged as random."""
    if node.target not in _CUDA_ATTENTION:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return bool(given.get("dropout_p", 0.0) == 0.0)
