"""Memory that is allocated without values, and then written in parts.

    ends = sizes.new_empty(len(sizes) + 1)
    ends[:1] = 0
    torch.cumsum(sizes, 0, out=ends[1:])

The values in `ends` are known if `sizes` is, but only because all of it has been written. In a
trace, a write into a part is an operator that returns the whole: a scatter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

UNINITIALISED = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
)
"""Operators that return uninitialised memory."""
_SCATTERS = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.as_strided_scatter.default,
)
_PARTS = (aten.slice.Tensor, aten.select.int, aten.as_strided.default)
_OVERWRITES = (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default)
"""Operators that read nothing of their first argument but its shape."""
_MOST_ELEMENTS = 2**20
"""Larger memory is not followed."""

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class PartlyWritten:
    """Memory of which some elements may have no value.

    recipe: how to compute it, with anything in these elements.
    written: the elements that have one (None: perhaps none).
    """

    recipe: Any
    written: torch.Tensor | None = None


def after_call(
    func: Any, args: Sequence[Any], first: PartlyWritten, recipe: _T
) -> _T | PartlyWritten | None:
    """What is known of a call's result if its first argument is partly written, and no other is.

    recipe: how to compute the result. Returned if all of it has a value.
    """
    if func in _OVERWRITES:
        return recipe
    if func in _PARTS:
        return PartlyWritten(recipe)
    if func not in _SCATTERS or not _can_be_followed(args[0]):
        return None
    with outside_of_tracing():
        written = first.written
        if written is None:
            written = torch.zeros(args[0].shape, dtype=torch.bool)
        written = func(written, torch.ones(args[1].shape, dtype=torch.bool), *args[2:])
        is_whole = bool(written.all())
    return recipe if is_whole else PartlyWritten(recipe, written)


def _can_be_followed(tensor: torch.Tensor) -> bool:
    """Whether its elements are all of its memory, in order: as_strided can reach others."""
    is_whole = tensor.is_contiguous() and not tensor.storage_offset()
    return is_whole and tensor.numel() <= _MOST_ELEMENTS


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """While inside, operators run in eager mode, although a trace may be running."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with (
        _disable_current_modes(),
        torch._C._ExcludeDispatchKeyGuard(keys),
        torch.no_grad(),
        torch._C._DisableAutocast(),
    ):
        yield
