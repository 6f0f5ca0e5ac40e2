"""How tensors lie in memory."""

from __future__ import annotations

from collections.abc import Sequence


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the strides put each element at the same place; where a size is 1 they do not
    matter."""
    each = zip(shape, one, other, strict=True)
    return all(size == 1 or a == b for size, a, b in each)
