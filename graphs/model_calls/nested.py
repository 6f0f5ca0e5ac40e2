"""Nested values that contain tensors: the arguments and outputs of a model.

PyTorch's pytree traverses tuples, lists, dicts, named tuples and registered classes (such as the
outputs of transformers). This module also traverses dataclasses and distributions
(`torch.distributions`) that contain a tensor. It converts them temporarily ("opens" them), since
registering another library's class with pytree would affect the whole process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

PLAIN_TYPES = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.memory_format, torch.layout),
)
"""Types of immutable values that are compared by value, not by identity."""
Spec = pytree.TreeSpec
unflatten = pytree.tree_unflatten


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves in order, and the structure, from which `unflatten(leaves, spec)` rebuilds the
    value."""
    return pytree.tree_flatten(_opened(value, ()))


def leaves(value: Any) -> list[Any]:
    """The leaves in order."""
    return pytree.tree_leaves(_opened(value, ()))


def tensors(value: Any) -> list[torch.Tensor]:
    """The leaves that are tensors, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def paths(spec: Spec) -> list[tuple[Any, ...]]:
    """The path of each leaf as pytree's keys (`torch.utils._pytree.keystr` formats them)."""
    # use tensors as leaves: a dataclass without a tensor would not be opened
    like = unflatten([torch.empty(0)] * spec.num_leaves, spec)
    return [path for path, _ in pytree.tree_flatten_with_path(_opened(like, ()))[0]]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A copy of the nested value with `change` applied to every tensor."""
    flat, spec = flatten(value)
    return unflatten(
        [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat], spec
    )


@dataclasses.dataclass(frozen=True)
class Repeated:
    """Takes the place of a tensor that is already the leaf at this index."""

    index: int


def with_repeats_marked(flat: Sequence[Any]) -> list[Any]:
    """The leaves, with all but the first occurrence of each tensor replaced by `Repeated`."""
    first: dict[int, int] = {}
    return [
        Repeated(first[id(leaf)])
        if isinstance(leaf, torch.Tensor) and first.setdefault(id(leaf), index) != index
        else leaf
        for index, leaf in enumerate(flat)
    ]


def with_repeats_restored(flat: Sequence[Any]) -> list[Any]:
    """The leaves with each `Repeated` replaced by its tensor: undoes `with_repeats_marked`."""
    return [flat[leaf.index] if isinstance(leaf, Repeated) else leaf for leaf in flat]


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A dataclass instance or distribution, as its class and its attributes (fields first)."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _OpenedSize:
    """A torch.Size, which pytree would rebuild as a tuple."""

    entries: torch.Size


def _opened(value: Any, enclosing: tuple[int, ...]) -> Any:
    """The value with its dataclass instances and distributions opened.

    enclosing: ids of the enclosing instances, which are not opened again (a cycle).
    """

    def opened(leaf: Any) -> Any:
        if type(leaf) is torch.Size:
            return _OpenedSize(leaf)
        if isinstance(leaf, type) or id(leaf) in enclosing:
            return leaf
        if dataclasses.is_dataclass(leaf):
            attributes = {f.name: None for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
        elif isinstance(leaf, Distribution):
            attributes = {}
        else:
            return leaf
        names = tuple(attributes | getattr(leaf, "__dict__", {}))
        inside = (*enclosing, id(leaf))
        values = tuple(_opened(getattr(leaf, name), inside) for name in names)
        # an instance without tensors is a plain option: it stays a leaf, compared by identity
        if not any(isinstance(item, torch.Tensor) for item in pytree.tree_leaves(values)):
            return leaf
        return _Opened(type(leaf), names, values)

    return pytree.tree_map(opened, value, is_leaf=lambda each: type(each) is torch.Size)


def _closed(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """Rebuild the instance without running __init__, which may check or change its arguments."""
    kind, names = context
    instance: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


pytree.register_pytree_node(
    _Opened,
    lambda opened: (list(opened.values), (opened.kind, opened.names)),
    _closed,
    flatten_with_keys_fn=lambda opened: (
        [(pytree.GetAttrKey(n), v) for n, v in zip(opened.names, opened.values, strict=True)],
        (opened.kind, opened.names),
    ),
)


def _closed_size(items: Any, _context: None) -> tuple[Any, ...]:
    """A Size; a tuple if there are placeholders instead of numbers."""
    items = tuple(items)
    return torch.Size(items) if all(type(item) is int for item in items) else items


pytree.register_pytree_node(
    _OpenedSize,
    lambda opened: (list(opened.entries), None),
    _closed_size,
    flatten_with_keys_fn=lambda opened: (
        [(pytree.SequenceKey(i), v) for i, v in enumerate(opened.entries)],
        None,
    ),
)
