"""Refuses steps in which the forward pass writes an input that shares memory with another input.

In a trace each input has memory of its own. In eager mode a write to one input changes every input
that overlaps it, so later reads would differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from graphs.model_calls import TraceError, dense_storage_key


def refuse_overlapping(
    tensors: Mapping[Any, torch.Tensor], written: Iterable[Any], titles: Mapping[Any, str]
) -> None:
    """Raise TraceError if a tensor that is written overlaps another one in memory.

    tensors: the inputs of the step, by any keys.
    written: keys of the inputs that the forward pass writes.
    titles: names of the inputs for messages, by the same keys.
    """
    for key, other in overlapping(tensors, written):
        raise TraceError(
            f"forward changes {titles[key]} in place, which shares memory with "
            f"{titles[other]}: a planned step would not see the change there; clone one of "
            "them"
        )


def overlapping(
    tensors: Mapping[Any, torch.Tensor], written: Iterable[Any]
) -> Iterator[tuple[Any, Any]]:
    """Find tensors that are written and overlap another one in memory.

    tensors, written: as in `refuse_overlapping`. Yields the keys of both.
    """
    keys_by_storage = _by_storage(tensors)
    for key in written:
        for other in keys_by_storage.get(dense_storage_key(tensors[key]), ()):
            if other == key:
                continue
            (start, end), (other_start, other_end) = (
                _byte_range(tensors[key]),
                _byte_range(tensors[other]),
            )
            if start < other_end and other_start < end:
                yield key, other


def shared_storages(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Find which of these tensors share a storage.

    Returns one triple for each tensor that does: (position of the first tensor on the same storage,
    its own position, its storage offset in elements).
    """
    groups = _by_storage(dict(enumerate(tensors))).values()
    return tuple(
        (group[0], position, tensors[position].storage_offset())
        for group in groups
        if len(group) > 1
        for position in group
    )


def _by_storage(tensors: Mapping[Any, torch.Tensor]) -> dict[int | None, list[Any]]:
    found: dict[int | None, list[Any]] = defaultdict(list)
    for key, tensor in tensors.items():
        if (storage := dense_storage_key(tensor)) is not None:
            found[storage].append(key)
    return found


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The tensor's first byte in its storage, and the byte after its last.

    Interleaved tensors count as overlapping.
    """
    if not tensor.numel():
        return 0, 0
    start = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = start + sum(int((size - 1) * stride) for size, stride in steps)
    return start * tensor.element_size(), (last + 1) * tensor.element_size()
